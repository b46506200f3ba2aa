# SPDX-License-Identifier: Apache-2.0
"""Experts go to a GPU piece by piece and arrive whole."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from pagedweight_jax.calibrate import memory


@pytest.mark.parametrize("piece_bytes", [1, 3 * 64 * 64 * 4, 1 << 30])
def test_experts_arrive_whole(tiny_weights, monkeypatch, piece_bytes):
    w = jax.tree.map(np.asarray, tiny_weights.layers[1])
    assert memory.experts_on_device(w) is w or jax.default_backend() == "gpu"
    monkeypatch.setattr(memory, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    sent = memory.experts_on_device(w)
    for name in ("gate_up_ENC", "down_ENC"):
        array = getattr(sent.mlp.experts, name)
        assert isinstance(array, jax.Array)
        np.testing.assert_array_equal(array, getattr(w.mlp.experts, name))
    assert sent.attention is w.attention


def test_memory_is_given_back_where_the_c_library_can(monkeypatch):
    trimmed = []
    libraries = iter([SimpleNamespace(), SimpleNamespace(malloc_trim=trimmed.append)])
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: next(libraries))
    memory.give_back()
    assert trimmed == []
    memory.give_back()
    assert trimmed == [0]
