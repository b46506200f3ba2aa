# SPDX-License-Identifier: Apache-2.0
"""Named shapes of real models, and arguments of them: what tests lower, benchmarks time and the self-test runs."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bitplane import BlockLayout
from pallas_kernels.cases import KernelCase
from pallas_kernels.moe_ffn import api
from pallas_kernels.moe_ffn.pages import WeightPages

POISON = 0xFFFFFFFF
"""What nobody may read: as codes all ones, as float16 NaN."""


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Routed experts of one model.

    Attributes:
      hidden_size, expert_width: D and F.
      num_experts, top_k: E and K.
      activation: a key of ``ACTIVATIONS``.
      frame_words: uint32 words of the arena frame that pads its pages least.
      min_bits, max_bits: supported bitwidths.
    """

    name: str
    hidden_size: int
    expert_width: int
    num_experts: int
    top_k: int
    activation: str = "silu"
    frame_words: int = 4096
    min_bits: int = 2
    max_bits: int = 8

    @property
    def layouts(self) -> tuple[BlockLayout, BlockLayout]:
        """Layouts of gate_up [2F, D] and down [D, F]."""
        bits_and_frame = self.min_bits, self.max_bits, self.frame_words
        return (
            BlockLayout(2 * self.expert_width, self.hidden_size, True, *bits_and_frame),
            BlockLayout(self.hidden_size, self.expert_width, False, *bits_and_frame),
        )


SPECS = {
    spec.name: spec
    for spec in (
        MoESpec(name="qwen1.5-moe", hidden_size=2048, expert_width=1408, num_experts=60, top_k=4),
        MoESpec(name="mixtral-8x7b", hidden_size=4096, expert_width=14336, num_experts=8, top_k=2),
        MoESpec(
            name="gemma-4-26b",
            hidden_size=2816,
            expert_width=704,
            num_experts=128,
            top_k=8,
            activation="gelu_pytorch_tanh",
            frame_words=2048,
        ),
    )
}


def abstract_args(spec: MoESpec, num_tokens: int, num_frames: int, dtype=jnp.bfloat16) -> tuple:
    """Returns the shapes of ``moe_ffn``'s arguments: arena, pages, m_TD, ids_TK."""
    shape = jax.ShapeDtypeStruct
    gate_up, down = spec.layouts
    pages = WeightPages(
        bits_EU=shape((spec.num_experts, 2), jnp.int32),
        gate_up_frames_EF=shape((spec.num_experts, gate_up.block_frames), jnp.int32),
        down_frames_EF=shape((spec.num_experts, down.block_frames), jnp.int32),
        gate_up=gate_up,
        down=down,
    )
    return (
        shape((num_frames, spec.frame_words), jnp.uint32),
        pages,
        shape((num_tokens, spec.hidden_size), dtype),
        shape((num_tokens, spec.top_k), jnp.int32),
    )


def random_pages(spec: MoESpec, bits_EU: np.ndarray, seed: int = 0) -> tuple[jax.Array, WeightPages]:
    """Returns (arena, pages): random planes and LUTs in frames in random order, ``POISON`` where nothing is resident.

    Args:
      bits_EU: int[E, 2], bitwidths of gate_up and down.
    """
    rng, num_experts = np.random.default_rng(seed), spec.num_experts
    num_frames = num_experts * sum(layout.block_frames for layout in spec.layouts) + 5
    arena = np.full((num_frames, spec.frame_words), POISON, np.uint32)
    free, tables = rng.permutation(num_frames).astype(np.int32), []
    for kind, layout in enumerate(spec.layouts):
        count = num_experts * layout.block_frames
        frames_EF, free = free[:count].reshape(num_experts, -1), free[count:]
        for e, bits in enumerate(bits_EU[:, kind]):
            for page in range(bits):
                frames = frames_EF[e, layout.page_starts[page] : layout.page_starts[page + 1]]
                words = np.full(frames.size * spec.frame_words, POISON, np.uint32)
                words[: layout.plane_words] = rng.integers(0, 2**32, layout.plane_words, dtype=np.uint32)
                if layout.has_lut(page):
                    start, lut_words = layout.lut_offset_words(page), layout.lut_words(page)
                    lut = rng.standard_normal(2 * lut_words, dtype=np.float32).astype(np.float16)
                    words[start : start + lut_words] = lut.view(np.uint32)
                arena[frames] = words.reshape(frames.size, -1)
        tables.append(jnp.asarray(frames_EF))
    pages = WeightPages(
        bits_EU=jnp.asarray(bits_EU, jnp.int32),
        gate_up_frames_EF=tables[0],
        down_frames_EF=tables[1],
        gate_up=spec.layouts[0],
        down=spec.layouts[1],
    )
    return jnp.asarray(arena), pages


def random_tokens(spec: MoESpec, num_tokens: int, seed: int = 0, dtype=jnp.float32) -> tuple:
    """Returns (m_TD, ids_TK); ids run through all experts and E, which selects nothing, in random order."""
    rng = np.random.default_rng(seed)
    ids = np.resize(rng.permutation(spec.num_experts + 1), num_tokens * spec.top_k).reshape(num_tokens, spec.top_k)
    m_TD = rng.standard_normal((num_tokens, spec.hidden_size)) * spec.hidden_size**-0.5
    return jnp.asarray(m_TD, dtype), jnp.asarray(ids, jnp.int32)


def cases() -> list[KernelCase]:
    """Returns each model's layer with experts at all its bitwidths, for one token, a batch and a chunk of a prompt."""
    found = []
    for spec in SPECS.values():
        few = replace(spec, num_experts=8, top_k=2)  # memory, not shapes: a program sees one expert
        bits_E = few.min_bits + np.arange(8) % (few.max_bits - few.min_bits + 1)

        def make_args(seed, num_tokens, dtype, spec=few, bits_E=bits_E):
            tokens = random_tokens(spec, num_tokens, seed, dtype)
            return *random_pages(spec, np.stack([bits_E, np.roll(bits_E, 3)], axis=1), seed), *tokens

        def layer(*args, implementation, activation=few.activation):
            return api.moe_ffn(*args, activation=activation, implementation=implementation)

        for num_tokens, dtype, tolerance in ((1, "float32", 5e-5), (16, "bfloat16", 1e-2), (256, "bfloat16", 1e-2)):
            found.append(
                KernelCase(
                    kernel="moe_ffn",
                    name=f"{spec.name}, {num_tokens} tokens, {dtype}",
                    make_args=partial(make_args, num_tokens=num_tokens, dtype=dtype),
                    run=jax.jit(partial(layer, implementation="triton")),
                    reference=jax.jit(partial(layer, implementation="xla")),
                    tolerance=tolerance,
                )
            )
    return found
