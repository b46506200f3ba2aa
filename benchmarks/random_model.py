# SPDX-License-Identifier: Apache-2.0
"""A model of Qwen1.5-MoE's sizes as its steps take it: shapes alone, or random numbers made on the device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.checkpoint.layout import layouts
from pagedweight_jax.config import ModelConfig
from pagedweight_jax.models.weights import Weights, init_weights, without_experts
from pagedweight_jax.paging.page_map import PageMap
from pagedweight_jax.serving.state import DecodeState, init_state, make_geometry
from pallas_kernels.bitplane import BlockLayout

FRAME_WORDS = 4096
MIN_BITS, MAX_BITS = 3, 8


def abstract_model(config: ModelConfig, rows: int, max_model_len: int, num_frames: int) -> tuple[Weights, DecodeState]:
    """Returns the shapes of (weights, state) in bfloat16."""
    pair = layouts(config, MIN_BITS, MAX_BITS, FRAME_WORDS)
    geometry = make_geometry(config, pair, "bfloat16", rows, max_model_len)
    L, E = config.num_sparse_layers, config.num_experts
    shape = jax.ShapeDtypeStruct
    pages = PageMap(
        bits_LEU=shape((L, E, 2), jnp.int32),
        gate_up_frames_LEF=shape((L, E, pair[0].block_frames), jnp.int32),
        down_frames_LEF=shape((L, E, pair[1].block_frames), jnp.int32),
    )
    state = jax.eval_shape(partial(init_state, geometry), shape((num_frames, FRAME_WORDS), jnp.uint32), pages)
    return abstract_weights(config), state


def abstract_weights(config: ModelConfig) -> Weights:
    """Returns the shapes of the weights that are not paged, bfloat16."""
    return jax.eval_shape(lambda: without_experts(init_weights(config, jax.random.key(0), jnp.bfloat16)))


def random_weights(config: ModelConfig) -> Weights:
    """Returns random matrices, norms of 1 and biases of 0; one small program per shape, for compiling takes time."""

    @partial(jax.jit, static_argnames="shape")
    def matrix(key, shape):
        return jax.random.uniform(key, shape, jnp.bfloat16, -1, 1) * jnp.bfloat16((3 / shape[0]) ** 0.5)

    keys = iter(range(10_000))

    def leaf(path, abstract):
        if abstract.ndim == 1:
            return jnp.full(abstract.shape, "norm" in jax.tree_util.keystr(path), abstract.dtype)
        return matrix(jax.random.key(next(keys), impl="rbg"), abstract.shape)

    return jax.tree_util.tree_map_with_path(leaf, abstract_weights(config))


def lut_words(layout: BlockLayout, bits: int) -> np.ndarray:
    """Returns which words of a block's first ``bits`` pages belong to a LUT, bool[frames, W]."""
    mask = np.zeros((layout.page_starts[bits], layout.frame_words), bool)
    for page in range(bits):
        if layout.has_lut(page):
            words = mask[layout.page_starts[page] : layout.page_starts[page + 1]].reshape(-1)
            words[layout.lut_offset_words(page) :] = True
    return mask


def frame_counts(config: ModelConfig, rows: int, max_model_len: int, bits: int) -> tuple[list[int], int]:
    """Returns (frames of gate_up and of down pages at ``bits`` bits, frames of all rows' KV blocks)."""
    pair = layouts(config, MIN_BITS, MAX_BITS, FRAME_WORDS)
    geometry = make_geometry(config, pair, "bfloat16", rows, max_model_len)
    blocks = config.num_sparse_layers * config.num_experts
    return [blocks * layout.page_starts[bits] for layout in pair], rows * geometry.blocks_per_row * (
        geometry.frames_per_block
    )


def random_state(config: ModelConfig, rows: int, context: int, max_model_len: int, bits: int) -> DecodeState:
    """Returns a state with every expert's pages at ``bits`` bits and every row decoding after ``context`` tokens.

    Plane words are random; a LUT's are float16 numbers of 1/sqrt(columns) in size, of either sign.
    """
    pair = layouts(config, MIN_BITS, MAX_BITS, FRAME_WORDS)
    geometry = make_geometry(config, pair, "bfloat16", rows, max_model_len)
    blocks = config.num_sparse_layers * config.num_experts
    counts, kv_frames = frame_counts(config, rows, max_model_len, bits)
    num_frames = sum(counts) + kv_frames + 1
    order = np.random.default_rng(1).permutation(num_frames).astype(np.int32)
    weight_frames, kv = np.split(order[: sum(counts) + kv_frames], [sum(counts)])
    arena = jax.jit(
        lambda: jax.random.bits(jax.random.key(0, impl="rbg"), (num_frames, FRAME_WORDS), jnp.uint32)
        & jnp.uint32(0xBFFFBFFF)  # as float16 and as bfloat16: finite, below 2
    )()

    @partial(jax.jit, donate_argnums=0)
    def with_luts(arena, frames, key):
        """Writes small float16 numbers: random signs and mantissas, the exponent of 1/64."""
        words = jax.random.bits(key, (frames.shape[0], FRAME_WORDS), jnp.uint32)
        return arena.at[frames].set((words & jnp.uint32(0x83FF83FF)) | jnp.uint32(0x24002400))

    tables = []
    for layout, frames in zip(pair, np.split(weight_frames, counts[:1]), strict=True):
        frames = frames.reshape(blocks, -1)
        whole = lut_words(layout, bits).all(axis=1)  # frames of planes may end with a LUT's first words; those stay
        arena = with_luts(arena, jnp.asarray(frames[:, whole].reshape(-1)), jax.random.key(2, impl="rbg"))
        table = np.zeros((blocks, layout.block_frames), np.int32)
        table[:, : frames.shape[1]] = frames
        tables.append(table.reshape(config.num_sparse_layers, config.num_experts, -1))
    pages = PageMap(
        bits_LEU=jnp.full((config.num_sparse_layers, config.num_experts, 2), bits, jnp.int32),
        gate_up_frames_LEF=jnp.asarray(tables[0]),
        down_frames_LEF=jnp.asarray(tables[1]),
    )
    state = init_state(geometry, arena, pages)
    rng = np.random.default_rng(3)
    return state.replace(
        block_tables_BGLF=jnp.asarray(kv.reshape(state.block_tables_BGLF.shape)),
        lengths_B=jnp.full(rows, context, jnp.int32),
        last_tokens_B=jnp.asarray(rng.integers(0, config.vocab_size, rows), jnp.int32),
        remaining_B=jnp.full(rows, 2**20, jnp.int32),
    )
