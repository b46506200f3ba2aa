# SPDX-License-Identifier: Apache-2.0
"""The self-test's cases: all of them on a GPU; one of each kernel, interpreted, is in ``test_cli_selftest``."""

import jax
import numpy as np
import pytest

from pallas_kernels.cases import relative_error
from pallas_kernels.selftest import KERNELS, list_cases, run_case, run_cases


def label(case):
    return f"{case.kernel}, {case.name}"


@pytest.mark.gpu
@pytest.mark.parametrize("case", list_cases(interpret=False), ids=label)
def test_real_sizes_equal_the_definition(case):
    result = run_case(case, timed=True)
    assert result.passed, result
    assert result.microseconds > 0


@pytest.mark.parametrize("interpret", [False, True])
def test_cases_are_listed_by_kernel_and_no_two_alike(interpret):
    cases = list_cases(interpret)
    assert list(dict.fromkeys(case.kernel for case in cases)) == list(KERNELS)
    for kernel in KERNELS:
        assert [label(case) for case in cases if case.kernel == kernel] == [
            label(case) for case in list_cases(interpret, kernel)
        ]
    assert len({label(case) for case in cases}) == len(cases)


def test_results_are_told_as_they_come_and_returned_in_the_order_of_the_cases():
    cases, told = list_cases(True, "frames"), []
    results = run_cases(cases[::-1], tell=told.append)
    assert [result.name for result in results] == [case.name for case in cases[::-1]]
    assert sorted(result.name for result in told) == sorted(case.name for case in cases)
    assert all(result in results for result in told)


def test_the_worst_row_decides():
    ref = np.ones((100, 8))
    out = ref.copy()
    out[7, 3] += 0.1
    assert relative_error(out, ref) == pytest.approx(0.1 / 8**0.5)
    assert relative_error(jax.numpy.asarray(ref), ref) == 0
    out[7, 3] = np.nan
    assert relative_error(out, ref) == np.inf
