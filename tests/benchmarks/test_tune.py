# SPDX-License-Identifier: Apache-2.0
"""What tuning makes of times: only sizes that are clearly faster in every case enter the table."""

from concurrent.futures import Future

import jax
import jax.numpy as jnp
import pytest
from tune import Trial, decode_candidates, fastest, table_of, write_table

from pallas_kernels.moe_ffn import grouped, pallas_triton
from pallas_kernels.moe_ffn.arg_specs import SPECS
from pallas_kernels.tuning import TABLE, key

HERE = jax.devices()[0].device_kind
NAME = "moe_ffn 32 x 64"


def trial(program, sizes, **times):
    """A trial of one block with the passes' microseconds by bitwidth, as b4=[..]."""
    times = {(NAME, int(bits[1:])): passes for bits, passes in times.items()}
    return Trial(
        name=program,
        sizes={NAME: sizes},
        kernels={NAME: ""},
        calls=1,
        compiled=Future(),
        args=lambda bits: (),
        bits=tuple(bits for _, bits in times),
        times=times,
    )


@pytest.mark.parametrize(("us", "chosen"), [(9.0, {"chunks": 3}), (9.8, {}), (11.0, {})])
def test_sizes_must_be_clearly_faster(us, chosen):
    trials = [trial("1 token", None, b4=[10.0]), trial("1 token", {"chunks": 3}, b4=[us])]
    assert fastest(trials) == {NAME: (chosen, pytest.approx(us / 10))}


def test_all_cases_count_alike_and_a_slow_pass_does_not():
    trials = [
        trial("1 token", None, b4=[10.0, 10.0, 10.0], b8=[20.0]),
        trial("16 tokens", None, b4=[100.0], b8=[200.0]),
        trial("1 token", {"chunks": 3}, b4=[8.0, 99.0, 8.0], b8=[20.0]),
        trial("16 tokens", {"chunks": 3}, b4=[100.0], b8=[200.0]),
        trial("1 token", {"chunks": 2}, b4=[1.0], b8=[1.0]),  # one of its cases was not timed
    ]
    assert fastest(trials) == {NAME: ({"chunks": 3}, pytest.approx(0.8**0.25))}
    assert fastest(trials[2:]) == {}, "without the heuristic's time nothing is known"


def test_a_table_in_force_is_the_only_one_and_ends():
    layout = SPECS["qwen1.5-moe"].layouts[0]
    heuristic, before = pallas_triton.configure(layout), dict(TABLE)
    name = key(pallas_triton.KERNEL, (layout.rows, layout.columns))
    with table_of({name: {"num_warps": 1}, "another": None}):
        assert pallas_triton.configure(layout).num_warps == 1 != heuristic.num_warps
        assert TABLE[HERE] == {name: {"num_warps": 1}}
    assert before == TABLE
    name = key(grouped.KERNEL, (layout.rows, layout.columns))
    with table_of({name: {"tile": 192}}):
        assert [grouped.configure(layout, jnp.bfloat16, pairs).tile for pairs in (10, 100)] == [64, 192]


@pytest.mark.parametrize("name", SPECS)
def test_candidates_divide_the_rows_and_differ_from_the_heuristic(name):
    for layout in SPECS[name].layouts:
        found, heuristic = decode_candidates(layout), vars(pallas_triton.configure(layout))
        assert 1 <= len(found) <= 4
        assert heuristic not in found
        for sizes in found:
            assert layout.rows % (8 * sizes["num_warps"]) == 0
            assert sizes["registers"] % 8 == 0


def test_a_written_table_keeps_what_was_not_timed(tmp_path, monkeypatch):
    entries = {"kept": {"chunks": 1}, "slower now": {"chunks": 2}, "found": {"chunks": 3}}
    monkeypatch.setitem(TABLE, "GPU", entries)
    monkeypatch.setitem(TABLE, "another GPU", {"found": {"chunks": 4}})
    write_table(tmp_path / "table.py", "GPU", {"slower now": {}, "found": {"chunks": 5}})
    written = {}
    exec((tmp_path / "table.py").read_text(), written)
    assert written["TABLE"] == {
        **{device: kept for device, kept in TABLE.items() if device not in ("GPU", "another GPU")},
        "GPU": {"kept": {"chunks": 1}, "found": {"chunks": 5}},
        "another GPU": {"found": {"chunks": 4}},
    }
