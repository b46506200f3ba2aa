# SPDX-License-Identifier: Apache-2.0
"""From a paged checkpoint to a state that can run: budget first, then programs, then memory."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.checkpoint.dense import abstract_dense
from pagedweight_jax.checkpoint.manifest import PagedManifest
from pagedweight_jax.checkpoint.paged import PagedCheckpoint, Progress, no_progress, read_ahead
from pagedweight_jax.checkpoint.policy import load_calibration
from pagedweight_jax.config import KINDS, ModelConfig, ServeConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.models.weights import Weights
from pagedweight_jax.paging.arena import FrameAllocator, make_arena
from pagedweight_jax.paging.host_pool import HostPool, fill_host_pool
from pagedweight_jax.paging.page_map import PageMap, page_map
from pagedweight_jax.paging.table import PageTable, bytes_table, initial_table
from pagedweight_jax.planning.calibration import Calibration
from pagedweight_jax.planning.planner import bits_range, initial_bits, lowest_bits
from pagedweight_jax.planning.queue import resident_bytes
from pagedweight_jax.serving import steps
from pagedweight_jax.serving.implementation import choose_implementation
from pagedweight_jax.serving.ledger import Ledger, device_memory_bytes, plan_ledger, tree_bytes
from pagedweight_jax.serving.programs import Programs, compile_programs
from pagedweight_jax.serving.staging import Staging, plan_staging
from pagedweight_jax.serving.state import DecodeState, Geometry, init_state, make_geometry
from pagedweight_jax.serving.temporaries import estimate_temporary_bytes
from pagedweight_jax.serving.trace import sums_bytes
from pagedweight_jax.units import format_size

SPARE_SHARE = 0.05
"""Share of the arena that may go unused before the programs are compiled again for a larger one."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model in memory, ready to serve.

    Attributes:
      weights: dense weights on the device.
      state: rows empty, resident pages in the arena.
      table, allocator, pool: the host's side of paging.
      calibration: what the planner works from.
      programs: compiled steps.
      ledger: what the device holds.
      batch_pages: pages that land together.
      update_frames: entries of a frame-list update.
    """

    weights: Weights
    state: DecodeState
    table: PageTable
    allocator: FrameAllocator
    pool: HostPool
    calibration: Calibration
    programs: Programs
    ledger: Ledger
    batch_pages: int
    update_frames: int


def load(
    checkpoint: PagedCheckpoint,
    config: ServeConfig,
    device: jax.Device | None = None,
    progress: Progress = no_progress,
    calibration: Calibration | None = None,
) -> Loaded:
    """Returns the checkpoint's model on ``device``, laid out within ``config.memory_bytes``.

    Nothing is allocated before it is known to fit; the programs are compiled for abstract arrays first, and their
    temporaries are part of what must fit.

    Args:
      checkpoint: what to serve.
      config: how.
      device: JAX's first one if None.
      progress: sees the stages "compile" and "load".
      calibration: what the planner works from; None for the checkpoint's own.

    Raises:
      UserError: the budget is too small or larger than the device, an option does not suit the model, or the
        checkpoint is damaged.
    """
    device = device or jax.devices()[0]
    model = checkpoint.manifest.config
    _check(checkpoint.manifest, config)
    limit_bytes = device_memory_bytes(device)
    if limit_bytes is not None and config.memory_bytes > limit_bytes:
        raise UserError(
            f"a budget of {format_size(config.memory_bytes)} exceeds the {format_size(limit_bytes)} that JAX may take "
            f"of the {device.device_kind} (XLA_PYTHON_CLIENT_MEM_FRACTION says which share)"
        )
    config = dataclasses.replace(config, implementation=choose_implementation(config.implementation, model, device))
    layouts = checkpoint.manifest.layouts()
    shapes = _shapes(checkpoint.manifest, config, device)
    geometry = shapes.geometry
    calibration = calibration or load_calibration(checkpoint)
    ledger, programs = _fit(shapes, config, floor_bits(calibration, config), progress)
    bits_LEU = _start_bits(calibration, bytes_table(layouts), geometry, ledger, config)
    weights = jax.device_put(checkpoint.load_dense(shapes.dtype), device)
    num_frames = ledger.arena_bytes // geometry.frame_bytes
    allocator = FrameAllocator(num_frames)
    table = initial_table(layouts, model.num_sparse_layers, model.num_experts, bits_LEU, allocator)
    arena_AW = make_arena(num_frames, geometry.kv.frame_words, device)
    arena_AW, pool = _load_pages(
        checkpoint, table, arena_AW, shapes.staging.total_pages, config.implementation, device, progress
    )
    state = init_state(geometry, arena_AW, jax.tree.map(jnp.array, page_map(table)))
    return Loaded(
        weights=weights,
        state=jax.device_put(state, device),
        table=table,
        allocator=allocator,
        pool=pool,
        calibration=calibration,
        programs=programs,
        ledger=ledger,
        batch_pages=shapes.staging.batch_pages,
        update_frames=shapes.staging.batch_frames,
    )


def floor_bits(calibration: Calibration, config: ServeConfig) -> np.ndarray:
    """Returns the bits to which each block is sure to give way, whatever the traffic, uint8 [L, E, U].

    A server whose pages do not move may begin at any; for it those are the checkpoint's smallest, or the pinned ones.
    """
    if config.mode == "frozen" or not config.planner.page_movement:
        return calibration.least_LEU
    return lowest_bits(calibration, config.planner)


def budget_bytes(
    manifest: PagedManifest, config: ServeConfig, *, bits: int, kv_tokens: int, device: jax.Device | None = None
) -> int:
    """Returns a memory budget under which ``config`` holds all experts at ``bits`` bits and ``kv_tokens`` of context.

    Args:
      manifest: of the checkpoint.
      config: its own ``memory_bytes`` is not read.
      bits: one of the checkpoint's bitwidths.
      kv_tokens: tokens of KV cache over all rows. The temporaries of the programs are estimated from above, so a little
        more may fit.
      device: JAX's first one if None.

    Raises:
      UserError: an option of ``config`` does not suit the model.
    """
    _check(manifest, config)
    shapes = _shapes(manifest, config, device or jax.devices()[0])
    kv_blocks = -(-kv_tokens // shapes.geometry.kv.block_tokens)
    entries = shapes.fixed_entries(estimate_temporary_bytes(shapes.model, shapes.geometry, config, shapes.dtype))
    num_experts = shapes.model.num_sparse_layers * shapes.model.num_experts
    experts_bytes = num_experts * sum(layout.resident_bytes(bits) for layout in manifest.layouts())
    return sum(entries.values()) + experts_bytes + kv_blocks * shapes.geometry.block_bytes


@dataclass(frozen=True, kw_only=True)
class _Shapes:
    """What is known of an engine before it has any memory."""

    weights: Weights
    dtype: str
    geometry: Geometry
    staging: Staging
    result_bytes: int

    @property
    def model(self) -> ModelConfig:
        return self.weights.config

    def fixed_entries(self, temporary_bytes: int) -> dict[str, int]:
        """The ledger's entries beside the arena."""
        return {
            "dense_bytes": tree_bytes(self.weights),
            "table_bytes": 2 * tree_bytes(_abstract_state(self.model, self.geometry, 0)),
            "temporary_bytes": temporary_bytes,
            "result_bytes": self.result_bytes,
            "staging_bytes": self.staging.total_bytes,
        }


def _shapes(manifest: PagedManifest, config: ServeConfig, device: jax.Device) -> _Shapes:
    model, layouts = manifest.config, manifest.layouts()
    # Two boundaries' results of every row: a chunk's and its share of a decode call's.
    row_bytes = 2 * sums_bytes(model.num_sparse_layers, model.num_experts)
    row_bytes += 4 * (config.prefill_chunk_tokens + 1 + config.steps_per_call)
    dtype = config.dtype or ("bfloat16" if device.platform == "gpu" else "float32")
    return _Shapes(
        weights=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), abstract_dense(model)),
        dtype=dtype,
        geometry=make_geometry(model, layouts, config.kv_dtype, config.max_num_seqs, config.max_model_len),
        staging=plan_staging(layouts, model.num_sparse_layers * model.num_experts),
        result_bytes=2 * config.max_num_seqs * row_bytes,
    )


def _check(manifest: PagedManifest, config: ServeConfig) -> None:
    model = manifest.config
    if config.bits is not None and not manifest.min_bits <= config.bits <= manifest.max_bits:
        raise UserError(f"bits {config.bits}: the checkpoint has {manifest.min_bits}..{manifest.max_bits}")
    head_bytes = model.head_dim * jnp.dtype(config.kv_dtype).itemsize
    if manifest.frame_bytes % head_bytes:
        raise UserError(
            f"kv_dtype {config.kv_dtype}: a frame of {manifest.frame_bytes} bytes does not hold whole heads of "
            f"{head_bytes} bytes"
        )
    if config.max_model_len > model.max_position_embeddings:
        raise UserError(
            f"max_model_len {config.max_model_len} exceeds the model's context of "
            f"{model.max_position_embeddings} tokens"
        )
    if config.prefill_chunk_tokens > config.max_model_len:
        raise UserError(
            f"prefill_chunk_tokens {config.prefill_chunk_tokens} exceeds max_model_len {config.max_model_len}"
        )


def _abstract_state(model: ModelConfig, geometry: Geometry, num_frames: int) -> DecodeState:
    layers, experts = model.num_sparse_layers, model.num_experts

    def make():
        zeros = partial(jnp.zeros, dtype=jnp.int32)
        pages = PageMap(
            bits_LEU=zeros((layers, experts, len(KINDS))),
            gate_up_frames_LEF=zeros((layers, experts, geometry.gate_up.block_frames)),
            down_frames_LEF=zeros((layers, experts, geometry.down.block_frames)),
        )
        return init_state(geometry, make_arena(num_frames, geometry.kv.frame_words), pages)

    return jax.eval_shape(make)


def _fit(shapes: _Shapes, config: ServeConfig, floor_LEU: np.ndarray, progress: Progress) -> tuple[Ledger, Programs]:
    """Compiles for the arena that an estimate of the temporaries leaves; again if it was too low or wastes memory.

    A budget is refused for what the programs really take, never for the estimate.
    """
    geometry = shapes.geometry
    layouts = (geometry.gate_up, geometry.down)

    def plan(temporary_bytes: int) -> Ledger:
        return plan_ledger(
            budget_bytes=config.memory_bytes,
            **shapes.fixed_entries(temporary_bytes),
            floor_bits=bits_range(floor_LEU),
            floor_bytes=resident_bytes(floor_LEU, bytes_table(layouts), layouts[0].min_bits),
            geometry=geometry,
        )

    def compiled(ledger: Ledger) -> Programs:
        state = _abstract_state(shapes.model, geometry, ledger.arena_bytes // geometry.frame_bytes)
        staging = shapes.staging
        return compile_programs(shapes.weights, state, config, staging.batch_pages, staging.batch_frames, progress)

    try:
        ledger = plan(estimate_temporary_bytes(shapes.model, geometry, config, shapes.dtype))
    except UserError:
        ledger = plan(0)
    programs = compiled(ledger)
    spare_bytes = ledger.temporary_bytes - programs.temporary_bytes
    if not 0 <= spare_bytes <= SPARE_SHARE * ledger.arena_bytes:
        ledger = plan(int(1.02 * programs.temporary_bytes))
        programs = compiled(ledger)
        if programs.temporary_bytes > ledger.temporary_bytes:
            raise RuntimeError(f"temporaries of {programs.temporary_bytes} bytes depend on the size of the arena")
    return dataclasses.replace(ledger, temporary_bytes=programs.temporary_bytes), programs


def _start_bits(
    calibration: Calibration, bytes_UQ: np.ndarray, geometry: Geometry, ledger: Ledger, config: ServeConfig
) -> np.ndarray:
    """Returns the bits to begin with, [L, E, U]: what the arena holds beside the KV cache that was asked for.

    A server that may move pages starts at the floor where its watermark leaves no more: the ledger accepted it.
    """
    kv_blocks = config.max_num_seqs * geometry.blocks_per_row
    if config.kv_tokens is not None:
        kv_blocks = -(-config.kv_tokens // geometry.kv.block_tokens)
    elif config.mode != "frozen":
        kv_blocks = min(kv_blocks, config.planner.high_watermark_blocks + 1)
    weight_bytes = ledger.arena_bytes - kv_blocks * geometry.block_bytes
    if config.kv_tokens is None and config.mode != "frozen":
        floor_bytes = resident_bytes(floor_bits(calibration, config), bytes_UQ, calibration.min_bits)
        weight_bytes = max(weight_bytes, floor_bytes)
    if config.bits is None:
        return initial_bits(calibration, bytes_UQ, weight_bytes, config.planner.global_sensitivity)
    bits_LEU = np.full(calibration.sensitivity_LEUQ.shape[:3], config.bits)
    needed_bytes = bits_LEU[..., 0].size * int(bytes_UQ[:, config.bits - calibration.min_bits].sum())
    if needed_bytes > weight_bytes:
        raise UserError(
            f"{config.bits} bits take {format_size(needed_bytes)}; the arena of {format_size(ledger.arena_bytes)} "
            f"less {kv_blocks} KV blocks of {format_size(geometry.block_bytes)} leaves {format_size(weight_bytes)}"
        )
    return bits_LEU


def _load_pages(
    checkpoint: PagedCheckpoint,
    table: PageTable,
    arena_AW: jax.Array,
    staged_pages: int,
    implementation: str,
    device: jax.Device,
    progress: Progress,
) -> tuple[jax.Array, HostPool]:
    """Fills the host pool leaf by leaf, and the arena with the pages that start on the device.

    ``staged_pages`` are on their way at a time: loading stays within the ledger's staging memory.
    """

    def land(leaf: np.ndarray, frames_EF: np.ndarray) -> None:
        nonlocal arena_AW
        held = np.flatnonzero(frames_EF[:, 0] >= 0)
        for begin in range(0, len(held), staged_pages):
            batch = np.resize(held[begin : begin + staged_pages], staged_pages)  # a short batch repeats its pages
            staged = jax.device_put(leaf[batch], device)
            arena_AW = steps.land_pages(arena_AW, staged, frames_EF[batch], implementation=implementation)
            jax.block_until_ready(arena_AW)

    def leaves():
        num_layers = table.state_LEUP.shape[0]
        places = product(range(num_layers), range(len(table.layouts)), range(table.layouts[0].max_bits))
        for (layer, kind, page), leaf in read_ahead(lambda place: checkpoint.load_pages(*place), places):
            progress("load", layer, num_layers)
            start, stop = table.layouts[kind].page_starts[page : page + 2]
            land(leaf, table.frames[layer][kind][:, start:stop])
            yield layer, kind, page, leaf
        progress("load", num_layers, num_layers)

    pool = fill_host_pool(leaves(), table.layouts, device)
    return arena_AW, pool
