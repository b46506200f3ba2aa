# SPDX-License-Identifier: Apache-2.0
"""The table of block sizes: what is measured wins, the heuristic serves the rest."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tuning
from pallas_kernels.moe_ffn import grouped, pallas_triton
from pallas_kernels.moe_ffn.arg_specs import SPECS
from pallas_kernels.moe_ffn.pallas_triton import configure
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


def sizes_of(kernel, rows, columns):
    """What a kernel takes for a model's block."""
    [layout] = {b for spec in SPECS.values() for b in spec.layouts if (b.rows, b.columns) == (rows, columns)}
    if kernel == grouped.KERNEL:
        return vars(grouped.configure(layout, jnp.bfloat16, pairs_per_expert=100))
    assert kernel == pallas_triton.KERNEL
    return vars(configure(layout))


@pytest.mark.parametrize("device", TABLE)
def test_every_entry_is_of_a_models_block_and_changes_its_sizes(device, monkeypatch):
    for name, sizes in TABLE[device].items():
        kernel, rows, _, columns = name.split()
        found = []
        for here in (device, "no such device"):
            monkeypatch.setattr(tuning, "device_kind", lambda here=here: here)
            found.append(sizes_of(kernel, int(rows), int(columns)))
        tuned, heuristic = found
        assert tuned == heuristic | sizes != heuristic


@pytest.mark.parametrize("device", [HERE, *TABLE])
@pytest.mark.parametrize("name", SPECS)
def test_programs_divide_the_rows_and_fit_a_multiprocessor(name, device, monkeypatch):
    monkeypatch.setattr(tuning, "device_kind", lambda: device)
    for layout in SPECS[name].layouts:
        config = configure(layout)
        assert layout.rows % (8 * config.num_warps) == 0
        assert layout.tile_rows % (8 * config.num_warps) == 0, "a program's rows are of one tile"
        assert config.registers % 8 == 0
        assert 32 * config.num_warps * config.registers <= 65536
