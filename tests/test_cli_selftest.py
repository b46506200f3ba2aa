# SPDX-License-Identifier: Apache-2.0
"""``pagedweight selftest``: one small case of each kernel, interpreted; what a kernel that errs looks like."""

import json
import re
from dataclasses import replace

import jax.numpy as jnp
import pytest

from pallas_kernels import selftest
from pallas_kernels.selftest import KERNELS, list_cases

FRAMES = list_cases(interpret=True, kernel="frames")

pytestmark = pytest.mark.usefixtures("compile_in_a_hurry")


@pytest.fixture
def use_cases(monkeypatch):
    """The function ``use_cases(cases)``: what the verb will run."""
    return lambda cases: monkeypatch.setattr(selftest, "list_cases", lambda interpret, kernel: cases)


def test_one_case_of_each_kernel_passes(run_cli, use_cases):
    use_cases([list_cases(interpret=True, kernel=kernel)[0] for kernel in KERNELS])
    code, out, err = run_cli("selftest", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert set(found) == {"device", "jax", "default_implementation", "interpreted", "passed", "seconds", "cases"}
    assert (found["default_implementation"], found["interpreted"], found["passed"]) == ("xla", True, True)
    assert [case["kernel"] for case in found["cases"]] == list(KERNELS)
    for case in found["cases"]:
        assert set(case) == {"kernel", "name", "dtype", "error", "tolerance", "microseconds", "failure", "passed"}
        assert case["passed"]
        assert case["error"] <= case["tolerance"] <= 1e-2
        assert case["dtype"] in ("float32", "bfloat16", "uint32")
        assert case["failure"] is case["microseconds"] is None


def test_a_kernel_that_errs_is_a_row_and_exit_code_1(run_cli, use_cases):
    gather, scatter = FRAMES
    use_cases([gather, replace(scatter, run=lambda arena, staged, frames: arena)])
    code, out, _ = run_cli("selftest")
    assert code == 1
    rows = [line.split() for line in out.splitlines() if line.split()[:1] == ["frames"]]
    assert {row[1]: row[-1] for row in rows} == {"gather_frames,": "pass", "scatter_frames,": "FAIL"}
    assert re.fullmatch(r"1 of 2 cases passed in \d+ s", out.splitlines()[-1])


def test_a_kernel_that_gives_nothing_or_no_number_fails(run_cli, use_cases):
    def refuse(*args):
        raise ValueError("no such instruction\nand a long story")

    gather, _ = FRAMES
    use_cases([replace(gather, run=refuse), replace(gather, run=lambda *args: jnp.full((9, 128), jnp.nan))])
    code, out, _ = run_cli("selftest", "--json")
    refused, nan = json.loads(out, parse_constant=pytest.fail)["cases"]  # NaN and Infinity are no JSON
    assert (code, refused["passed"], nan["passed"]) == (1, False, False)
    assert (refused["error"], refused["failure"]) == (None, "ValueError: no such instruction")
    assert (nan["error"], nan["failure"]) == (None, "not all results are finite")
    rows = run_cli("selftest")[1].splitlines()
    reasons = {rows[at + 1].strip() for at, line in enumerate(rows) if gather.name in line and "FAIL" in line}
    assert reasons == {refused["failure"], nan["failure"]}


def test_only_the_named_kernel_runs(run_cli):
    code, out, _ = run_cli("selftest", "--kernel", "frames", "--json")
    assert code == 0
    assert [case["name"] for case in json.loads(out)["cases"]] == [case.name for case in FRAMES]


def test_an_unknown_kernel_is_refused(run_cli):
    code, out, err = run_cli("selftest", "--kernel", "attention")
    assert (code, out) == (2, "")
    assert err == f"pagedweight: there is no kernel 'attention'; there are {', '.join(KERNELS)}\n"
