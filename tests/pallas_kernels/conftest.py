# SPDX-License-Identifier: Apache-2.0
"""Interpreted kernels are large programs that run once: compiling them is what takes time."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def compile_in_a_hurry():
    """Leaves most of XLA's optimizations out on a CPU, where kernels are interpreted; never on a GPU."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
    yield
    jax.config.update("jax_disable_most_optimizations", before)
