# SPDX-License-Identifier: Apache-2.0
"""A tiny paged checkpoint with random pages, and its weights dequantized by independent code."""

from collections import deque
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.checkpoint.dense import named_leaves
from pagedweight_jax.checkpoint.draft import save
from pagedweight_jax.checkpoint.manifest import CalibrationRun, PagedManifest, page_name
from pagedweight_jax.checkpoint.paged import PagedCheckpoint, open_checkpoint
from pagedweight_jax.config import KINDS, PlannerConfig, ServeConfig
from pagedweight_jax.models.weights import ExpertWeights, Weights, init_weights, without_experts
from pagedweight_jax.paging.arena import KV, FrameAllocator, make_arena
from pagedweight_jax.paging.page_map import page_map
from pagedweight_jax.paging.table import initial_table
from pagedweight_jax.serving import steps
from pagedweight_jax.serving.engine import Engine
from pagedweight_jax.serving.state import MAX_STOP_IDS, init_state, make_geometry
from pallas_kernels.bitplane import pack_page

MIN_BITS, MAX_BITS, FRAME_BYTES = 3, 6, 1024


@dataclass(frozen=True)
class Tiny:
    """A checkpoint on disk; ``codes`` and ``luts`` by (layer, kind)."""

    checkpoint: PagedCheckpoint
    dense: Weights
    codes: dict
    luts: dict

    def dequantized(self, bits_LEU) -> Weights:
        """Returns dense weights whose experts are the pages' values at the given bits."""
        layers = list(self.dense.layers)
        for layer, w in enumerate(layers):
            blocks = []
            for kind in range(len(KINDS)):
                codes, luts = self.codes[layer, kind], self.luts[layer, kind]
                of_expert = []
                for e, bits in enumerate(np.asarray(bits_LEU)[layer, :, kind]):
                    index = (codes[e] >> (MAX_BITS - bits)).astype(int)
                    of_expert.append(np.take_along_axis(luts[bits][e], index, axis=1).astype(np.float32))
                blocks.append(np.stack(of_expert))
            experts = ExpertWeights(gate_up_ENC=jnp.array(blocks[0]), down_ENC=jnp.array(blocks[1]))
            layers[layer] = replace(w, mlp=replace(w.mlp, experts=experts))
        return replace(self.dense, layers=tuple(layers))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, tiny_config) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "paged", tiny_config(max_position_embeddings=2048))


@pytest.fixture(scope="session")
def flat(tmp_path_factory, tiny_config) -> Tiny:
    """A checkpoint whose values are the same at every bitwidth: whatever the planner does, the tokens must not change.

    Its pages still differ, so that one read before it landed, or from another's frames, shows.
    """
    return make_tiny(tmp_path_factory.mktemp("flat") / "paged", tiny_config(max_position_embeddings=2048), flat=True)


@pytest.fixture(scope="session")
def flat_engine(flat):
    """A dynamic engine over ``flat``, idle between tests: contexts of 96 tokens, chunks and KV blocks of 16.

    All is float32, also on a GPU: a preempted request's tokens come back through prefill, and blocks of other bits
    through other sums, both of which round otherwise in bfloat16.
    """
    config = ServeConfig(
        memory_bytes=8 << 20,  # beside this the estimate of temporaries wastes little, so programs are compiled once
        max_num_seqs=4,
        max_model_len=96,
        prefill_chunk_tokens=16,
        steps_per_call=4,
        dtype="float32",
        kv_dtype="float32",
        planner=PlannerConfig(low_watermark_blocks=0, high_watermark_blocks=1, hysteresis_boundaries=1),
    )
    engine = Engine(flat.checkpoint, config)
    yield engine
    engine.close()


def make_tiny(path, config, flat=False) -> Tiny:
    rng = np.random.default_rng(11)
    dense = without_experts(init_weights(config, jax.random.key(7)))
    L, E = config.num_sparse_layers, config.num_experts
    widths = MAX_BITS - MIN_BITS + 1
    manifest = PagedManifest(
        config=config,
        min_bits=MIN_BITS,
        max_bits=MAX_BITS,
        frame_bytes=FRAME_BYTES,
        calibration=CalibrationRun(
            text_sha256="0" * 64, samples=0, sequence_length=0, seed=0, min_tokens=0, uncalibrated_experts=0
        ),
        versions={},
    )
    codes, luts, groups = {}, {}, []
    for layer in range(L):
        arrays = {}
        for kind, layout in enumerate(manifest.layouts()):
            shape = (E, layout.rows, layout.columns)
            codes[layer, kind] = rng.integers(0, 2**MAX_BITS, shape, dtype=np.uint8)
            top = np.sort(rng.normal(size=(E, layout.rows, 2**MAX_BITS)), axis=-1) * layout.columns**-0.5
            if flat:  # as float16, so that the means of equal values are exact
                top = np.repeat(top[..., :: 2 ** (widths - 1)].astype(np.float16), 2 ** (widths - 1), axis=-1)
            luts[layer, kind] = {
                b: top.reshape(E, layout.rows, 2**b, -1).mean(axis=-1).astype(np.float16)
                for b in range(MIN_BITS, MAX_BITS + 1)
            }
            for page in range(MAX_BITS):
                lut = luts[layer, kind].get(page + 1)
                arrays[page_name(layer, kind, page)] = pack_page(codes[layer, kind], lut, page, layout)
        groups.append(arrays)
    groups.append({f"dense/{name}": np.asarray(leaf) for name, leaf in named_leaves(dense).items()})
    groups.append(
        {
            "calibration/sensitivity": np.sort(rng.random((L, E, 2, widths)), axis=-1)[..., ::-1].copy(),
            "calibration/uncalibrated": np.zeros((L, E), bool),
            "calibration/tokens": np.ones((L, E), np.int64),
            "calibration/importance/gate_up": np.ones((L, E, config.hidden_size), np.float32),
            "calibration/importance/down": np.ones((L, E, config.moe_intermediate_size), np.float32),
        }
    )
    save(path, manifest, groups, files={})
    return Tiny(open_checkpoint(path), dense, codes, luts)


class LateMover:
    """A mover whose transfers arrive late: each boundary sees the next one with probability ``chance``."""

    def __init__(self, mover, chance, seed):
        self.mover, self.chance = mover, chance
        self.rng = np.random.default_rng(seed)
        self.arrived = deque()

    def __getattr__(self, name):
        return getattr(self.mover, name)

    def poll(self):
        self.arrived += self.mover.poll()
        landed = []
        while self.arrived and self.rng.random() < self.chance:
            landed.append(self.arrived.popleft())
        return landed


@pytest.fixture(scope="session")
def late_mover():
    """The class ``LateMover``."""
    return LateMover


class Stepping:
    """Steps called by hand on ``tiny``: 3 rows of 128 tokens, chunks of 16."""

    rows, context, chunk = 3, 128, 16

    def __init__(self, tiny):
        self.tiny = tiny

    def random_bits(self, seed=0):
        rng = np.random.default_rng(seed)
        config = self.tiny.checkpoint.manifest.config
        return rng.integers(3, 7, (config.num_sparse_layers, config.num_experts, 2))

    def state(self, bits_LEU, spare_frames=0, kv_dtype="float32"):
        """Returns a state with the pages of the given bits resident and every row's KV blocks taken."""
        checkpoint = self.tiny.checkpoint
        layouts, config = checkpoint.manifest.layouts(), checkpoint.manifest.config
        geometry = make_geometry(config, layouts, kv_dtype, self.rows, self.context)
        kv_frames = self.rows * geometry.blocks_per_row * geometry.frames_per_block
        weight_frames = config.num_sparse_layers * config.num_experts * sum(layout.block_frames for layout in layouts)
        allocator = FrameAllocator(kv_frames + weight_frames + spare_frames)
        table = initial_table(layouts, config.num_sparse_layers, config.num_experts, bits_LEU, allocator)
        arena = make_arena(allocator.num_frames, geometry.kv.frame_words) + jnp.uint32(0x7FC07FC0)  # NaN everywhere
        for layer in range(config.num_sparse_layers):
            for kind, layout in enumerate(layouts):
                for page in range(layout.max_bits):
                    begin, end = layout.page_starts[page : page + 2]
                    frames = table.frames[layer][kind][:, begin:end]
                    frames = np.where(frames < 0, allocator.num_frames, frames)
                    arena = steps.land_pages(arena, checkpoint.load_pages(layer, kind, page), frames)
        state = init_state(geometry, arena, jax.tree.map(jnp.array, page_map(table)))
        tables = allocator.take(kv_frames, KV).reshape(state.block_tables_BGLF.shape)
        return state.replace(block_tables_BGLF=jnp.array(tables))

    def start(self, state, row, temperature=0.0, seed=0, stops=()):
        stop_ids = np.full(MAX_STOP_IDS, -1, np.int32)
        stop_ids[: len(stops)] = stops
        return steps.assign_row(state, np.int32(row), np.float32(temperature), np.uint32(seed), stop_ids)

    def prefill(self, weights, state, row, prompt, budget, step=steps.prefill_step):
        """Returns (state, first token) of a whole prompt."""
        for begin in range(0, len(prompt), self.chunk):
            part = prompt[begin : begin + self.chunk]
            padded = np.zeros(self.chunk, np.int32)
            padded[: len(part)] = part
            last = begin + self.chunk >= len(prompt)
            state, token, _ = step(
                weights, state, np.int32(row), padded, np.int32(len(part)), np.int32(budget if last else 0)
            )
        return state, int(token)


@pytest.fixture
def stepping(tiny):
    return Stepping(tiny)
