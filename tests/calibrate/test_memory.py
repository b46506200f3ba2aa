# SPDX-License-Identifier: Apache-2.0
"""Experts go to a GPU piece by piece and arrive whole; what was freed does not stay."""

import os
import platform
import subprocess
import sys
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


KEPT = """
import ctypes, sys, threading
import numpy as np
from pagedweight_jax.calibrate.memory import give_back, map_large_arrays

def anonymous_bytes():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(fields["RssAnon"].split()[0]) * 1024

map_large_arrays()
np.ones(31 << 20, np.uint8)  # freed, it teaches glibc that arrays of its size come and go
before, together, kept = anonymous_bytes(), threading.Barrier(16), []

def work():
    together.wait()
    held = np.ones(21 << 20, np.uint8)
    together.wait()
    if sys.argv[1] == "held":
        kept.append(held)

threads = [threading.Thread(target=work) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
give_back()
print(anonymous_bytes() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
@pytest.mark.parametrize("arrays", ["freed", "held"])
def test_no_thread_keeps_what_large_arrays_had(arrays):
    """The control holds the arrays: then all of them are seen."""
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.arena_max=64", "JAX_PLATFORMS": "cpu"}
    argv = [sys.executable, "-c", KEPT, arrays]
    kept_bytes = int(subprocess.run(argv, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)
    assert kept_bytes < 8 << 20 if arrays == "freed" else kept_bytes > 16 * 20 << 20
