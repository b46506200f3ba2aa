# SPDX-License-Identifier: Apache-2.0
"""How many bytes the KV cache needs from the weights, or leaves to them (eq. 7)."""

from pagedweight_jax.config import PlannerConfig
from pagedweight_jax.planning.observation import KVPressure


def pressure_triggered(kv: KVPressure, config: PlannerConfig) -> bool:
    """Returns whether F_blk has come down to the free-block threshold T_blk, that is, whether D > 0."""
    return _free_blocks(kv) <= config.low_watermark_blocks


def target_bytes_from_kv_pressure(kv: KVPressure, config: PlannerConfig) -> int:
    """Returns D = max(0, T_blk + 1 − F_blk) · B_KV, the bytes to release (eq. 7).

    F_blk leaves out blocks that pending growth will take, and counts bytes that are released already.
    """
    return max(0, config.low_watermark_blocks + 1 - _free_blocks(kv)) * kv.block_bytes


def reload_bytes_from_kv_headroom(kv: KVPressure, config: PlannerConfig) -> int:
    """Returns the bytes that reloads may take now: eq. 7 mirrored at the high watermark, at most ``max_reload_bytes``.

    Bytes that are released but not yet reusable cannot be taken, so they do not count here.
    """
    spare_blocks = kv.free_blocks - kv.pending_blocks - (config.high_watermark_blocks + 1)
    return min(max(0, spare_blocks) * kv.block_bytes, config.max_reload_bytes)


def _free_blocks(kv: KVPressure) -> int:
    return kv.free_blocks - kv.pending_blocks + kv.releasing_blocks
