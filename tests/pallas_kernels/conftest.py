# SPDX-License-Identifier: Apache-2.0
import pytest


@pytest.fixture(autouse=True, scope="module")
def interpreted_kernels(compile_in_a_hurry):
    """Interpreted kernels are large programs that run once: compiling them is what takes time."""
