# SPDX-License-Identifier: Apache-2.0
"""The table of block sizes: what is measured wins, the heuristic serves the rest."""

import jax
import pytest

from pallas_kernels import tuning
from pallas_kernels.moe_ffn.arg_specs import SPECS
from pallas_kernels.moe_ffn.pallas_triton import configure
from pallas_kernels.moe_ffn.slices import num_chunks
from pallas_kernels.tuning_table import TABLE

HERE = jax.devices()[0].device_kind


def test_what_was_measured_wins_and_the_rest_is_heuristic():
    table = {HERE: {"moe_ffn 32 x 64": {"chunks": 3}}, "another": {"moe_ffn 64 x 64": {"chunks": 5}}}
    heuristic = {"num_warps": 2, "chunks": 1}
    assert tuning.tuned("moe_ffn", (32, 64), heuristic, table) == {"num_warps": 2, "chunks": 3}
    assert tuning.tuned("moe_ffn", (64, 64), heuristic, table) == heuristic
    assert tuning.tuned("dense", (32, 64), heuristic, table) == heuristic
    assert heuristic == {"num_warps": 2, "chunks": 1}


def test_an_unknown_device_runs_by_heuristic(monkeypatch):
    monkeypatch.setattr(tuning, "device_kind", lambda: "no such device")
    assert tuning.tuned("moe_ffn", (2816, 2048), {"chunks": 1}) == {"chunks": 1}


@pytest.mark.parametrize("device", [HERE, *TABLE])
@pytest.mark.parametrize("name", SPECS)
def test_programs_cover_all_columns_with_few_spare_warps(name, device, monkeypatch):
    monkeypatch.setattr(tuning, "device_kind", lambda: device)
    for layout in SPECS[name].layouts:
        config = configure(layout)
        assert config.num_warps & (config.num_warps - 1) == 0
        assert 1 <= config.chunks <= num_chunks(layout)
        assert config.num_warps * config.chunks < 2 * num_chunks(layout) + 1
