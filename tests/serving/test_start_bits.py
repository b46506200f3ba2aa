# SPDX-License-Identifier: Apache-2.0
"""The bits that an engine begins with, for the KV cache that its configuration asks for."""

from dataclasses import replace

import numpy as np
import pytest

from pagedweight_jax.config import PlannerConfig, ServeConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.paging.table import bytes_table
from pagedweight_jax.planning.calibration import Calibration
from pagedweight_jax.serving.ledger import Ledger
from pagedweight_jax.serving.loading import _start_bits
from pagedweight_jax.serving.state import make_geometry

CONFIG = ServeConfig(memory_bytes=1 << 30, max_num_seqs=2, max_model_len=64, planner=PlannerConfig())


@pytest.fixture
def start(tiny):
    """The function ``start(spare_blocks, config) -> bits``: an arena of the top width and that many KV blocks."""
    manifest = tiny.checkpoint.manifest
    layouts = manifest.layouts()
    bytes_UQ = bytes_table(layouts)
    calibration = Calibration(
        sensitivity_LEUQ=tiny.checkpoint.sensitivity, min_bits=manifest.min_bits, max_bits=manifest.max_bits
    )

    def bits(spare_blocks: int, config: ServeConfig, width: int = -1) -> np.ndarray:
        geometry = make_geometry(manifest.config, layouts, "float32", config.max_num_seqs, config.max_model_len)
        blocks = calibration.sensitivity_LEUQ[:, :, 0, 0].size
        arena_bytes = blocks * int(bytes_UQ[:, width].sum()) + spare_blocks * geometry.block_bytes
        ledger = Ledger(
            budget_bytes=1 << 30,
            dense_bytes=0,
            table_bytes=0,
            temporary_bytes=0,
            result_bytes=0,
            staging_bytes=0,
            arena_bytes=arena_bytes,
        )
        return _start_bits(calibration, bytes_UQ, geometry, ledger, config)

    return bits


def test_a_dynamic_server_leaves_its_watermark_but_no_more_than_its_rows_can_use(start):
    watermark = replace(CONFIG, planner=PlannerConfig(low_watermark_blocks=1, high_watermark_blocks=3))
    assert np.all(start(4, watermark) == 6)
    assert not np.all(start(3, watermark) == 6)
    rows_blocks = 2 * (64 // 16)  # two rows of 64 tokens in blocks of 16
    endless = replace(CONFIG, planner=PlannerConfig(low_watermark_blocks=1, high_watermark_blocks=10_000))
    assert np.all(start(rows_blocks, endless) == 6)
    assert not np.all(start(rows_blocks - 1, endless) == 6)


def test_a_dynamic_server_starts_at_the_floor_if_its_watermark_leaves_no_more(start):
    assert np.all(start(0, CONFIG, width=0) == 3)
    with pytest.raises(UserError, match="the routed experts take"):
        start(0, replace(CONFIG, kv_tokens=64), width=0)
    with pytest.raises(UserError, match="the routed experts take"):
        start(0, replace(CONFIG, mode="frozen"), width=0)
