# SPDX-License-Identifier: Apache-2.0
"""A conversion that is killed, or runs out of disk, goes on and ends with the bytes of one that was not."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from pagedweight_jax.calibrate import convert as conversion
from pagedweight_jax.calibrate.convert import convert
from pagedweight_jax.calibrate.hidden import HiddenStates
from pagedweight_jax.checkpoint import draft as drafts
from pagedweight_jax.checkpoint.paged import open_checkpoint, verify
from pagedweight_jax.errors import UserError

SMALL = {"bits": (2, 3), "samples": 8, "sequence_length": 32}

KILLED = """
import os, signal, sys
from pathlib import Path

changes, (number, last) = 0, sys.argv[3:]

def die_in_time(event, arguments):
    global changes
    if event in ("os.rename", "os.mkdir", "os.remove", "open", "shutil.rmtree") and "out.partial" in str(arguments[0]):
        changes += 1
        if changes == int(number) or last and (event + " " + str(arguments[0])).endswith(last):
            os.kill(os.getpid(), signal.SIGKILL)

from pagedweight_jax.calibrate.convert import convert
sys.addaudithook(die_in_time)
convert(Path(sys.argv[1]), Path(sys.argv[2]), bits=(2, 3), samples=8, sequence_length=32, report=print)
print("changes", changes)
"""
"""Converts, and dies by SIGKILL before its n-th change of a file of the draft, or before a certain one."""


def silent(line):
    pass


def run_killed(folder, out, number=0, last=""):
    argv = [sys.executable, "-c", KILLED, str(folder), str(out), str(number), last]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def whole(hf_folder, tmp_path_factory):
    """An uninterrupted conversion: (its manifest, changes of files that it took)."""
    out = tmp_path_factory.mktemp("whole") / "out"
    result = run_killed(hf_folder, out)
    assert result.returncode == 0, result.stderr
    return (out / "manifest.json").read_bytes(), int(result.stdout.split()[-1])


def interrupted(monkeypatch, hf_folder, out, error, after, **options):
    """Converts until ``after`` layers are finished, then raises ``error``; returns the layers that were begun."""
    begun = []

    def convert_layer(source, manifest, layer, *arguments):
        begun.append(layer)
        if layer == after:
            raise error
        return layer_of(source, manifest, layer, *arguments)

    layer_of = conversion.convert_layer
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "convert_layer", convert_layer)
        if after is None:
            convert(hf_folder, out, **SMALL | options)
        else:
            with pytest.raises(type(error)):
                convert(hf_folder, out, **SMALL | options)
    return begun


def test_killed_at_any_moment_it_ends_with_the_same_manifest(hf_folder, whole, tmp_path):
    """Two deaths at random moments, then to the end."""
    manifest, changes = whole
    out = tmp_path / "out"
    for number in np.random.default_rng(0).integers(10, changes // 2, 2):  # the second continues the first
        result = run_killed(hf_folder, out, number)
        assert result.returncode == -signal.SIGKILL, result.stderr
        with pytest.raises(UserError, match="no such folder"):
            open_checkpoint(out)
    convert(hf_folder, out, report=silent, **SMALL)
    assert (out / "manifest.json").read_bytes() == manifest
    assert verify(out) == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("last", "published"), [("os.rename OUT/checkpoint", False), ("shutil.rmtree OUT", True)], ids=["before", "after"]
)
def test_killed_about_the_last_rename_nothing_is_lost(hf_folder, whole, tmp_path, monkeypatch, last, published):
    out = tmp_path / "out"
    assert run_killed(hf_folder, out, last=last.replace("OUT", f"{out}.partial")).returncode == -signal.SIGKILL
    assert out.exists() == published
    if not published:
        assert interrupted(monkeypatch, hf_folder, out, None, None, report=silent) == []
    assert (out / "manifest.json").read_bytes() == whole[0]
    assert verify(out) == []


def test_finished_layers_are_not_done_again(hf_folder, whole, tmp_path, monkeypatch):
    lines, out = [], tmp_path / "out"
    assert interrupted(monkeypatch, hf_folder, out, KeyboardInterrupt(), 1, report=silent) == [0, 1]
    assert interrupted(monkeypatch, hf_folder, out, None, None, report=lines.append) == [1]
    assert f"{out}.partial: continuing after 2 finished steps" in lines
    assert (out / "manifest.json").read_bytes() == whole[0]


@pytest.mark.parametrize(
    ("error", "seen"), [(OSError(errno.EIO, "Input/output error"), UserError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_a_computed_layer_is_kept_when_the_next_cannot_be_read(hf_folder, whole, tmp_path, monkeypatch, error, seen):
    out, read_layer = tmp_path / "out", conversion.hf.read_layer

    def failing(source, layer):
        if layer == 1:
            raise error
        return read_layer(source, layer)

    with monkeypatch.context() as patch:
        patch.setattr(conversion.hf, "read_layer", failing)
        with pytest.raises(seen) as raised:
            convert(hf_folder, out, report=silent, **SMALL)
    if seen is UserError:
        assert re.search(r"out: .*Input/output error; 2 finished steps are kept in out\.partial", str(raised.value))
    assert sorted(path.stem for path in (tmp_path / "out.partial" / "steps").iterdir()) == ["layer-0000", "outer"]
    assert interrupted(monkeypatch, hf_folder, out, None, None, report=silent) == [1]
    assert (out / "manifest.json").read_bytes() == whole[0]


def test_another_conversion_starts_anew_and_says_so(hf_folder, whole, tmp_path, monkeypatch):
    folder = shutil.copytree(hf_folder, tmp_path / "hf")
    for change, why in (
        ({"seed": 1}, "another calibration and choice of tokens"),
        ({"bits": (2, 4)}, "another range of bits"),
        ({}, "another source"),
    ):
        lines, out = [], tmp_path / why
        interrupted(monkeypatch, folder, out, KeyboardInterrupt(), 1, report=silent)
        if not change:
            os.utime(folder / "model.safetensors", ns=(1, 1))
        assert interrupted(monkeypatch, folder, out, None, None, report=lines.append, **change) == [0, 1]
        assert f"{out}.partial: starting anew, it was made from {why}" in lines
        assert ((out / "manifest.json").read_bytes() == whole[0]) == (not change)


def test_a_lost_array_starts_anew(hf_folder, tmp_path, monkeypatch):
    lines, out = [], tmp_path / "out"
    interrupted(monkeypatch, hf_folder, out, KeyboardInterrupt(), 1, report=silent)
    shutil.rmtree(tmp_path / "out.partial" / "checkpoint" / "arrays" / "pages" / "0")
    assert interrupted(monkeypatch, hf_folder, out, None, None, report=lines.append) == [0, 1]
    assert f"{out}.partial: starting anew, its pages/0 is gone" in lines


def test_hidden_states_cut_short_are_noticed(hf_folder, tmp_path, monkeypatch):
    interrupted(monkeypatch, hf_folder, tmp_path / "out", KeyboardInterrupt(), 1, report=silent)
    (tmp_path / "out.partial" / "scratch" / "1.hidden").write_bytes(b"short")
    with pytest.raises(UserError, match=r"1\.hidden: missing or cut short"):
        convert(hf_folder, tmp_path / "out", report=silent, **SMALL)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("EXHAUSTED: No space left on device")]
)
def test_a_full_disk_loses_nothing(hf_folder, whole, tmp_path, monkeypatch, error, layer):
    """Orbax raises either, at a layer's pages; no later layer is written."""
    out, save = tmp_path / "out", drafts.ocp.save

    def failing(path, arrays):
        if f"pages/{layer}/down/0" in arrays:
            raise error
        save(path, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(drafts.ocp, "save", failing)
        with pytest.raises(UserError, match=rf"left on the disk; {layer + 1} finished steps are kept in out\.partial"):
            convert(hf_folder, out, report=silent, **SMALL)
    assert not out.exists()
    assert interrupted(monkeypatch, hf_folder, out, None, None, report=silent) == [0, 1][layer:]
    assert (out / "manifest.json").read_bytes() == whole[0]


def test_a_disk_without_room_for_a_layer_is_noticed_before_it_is_written(hf_folder, tmp_path, monkeypatch, capfd):
    out, usage = tmp_path / "out", shutil.disk_usage
    full = drafts.shutil.disk_usage("/")._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(drafts.shutil, "disk_usage", lambda path: full if path.name == "scratch" else usage(path))
        with pytest.raises(UserError, match=r"no space left on the disk; nothing was written$"):
            convert(hf_folder, out, report=silent, **SMALL)
    assert "Traceback" not in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_limit_on_files_names_the_checkpoint(hf_folder, tmp_path, monkeypatch):
    def limited(self, layer):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(HiddenStates, "write", limited)
    with pytest.raises(UserError, match=r"out: \[Errno \d+\] File too large; nothing was written$"):
        convert(hf_folder, tmp_path / "out", report=silent, **SMALL)


def test_two_conversions_do_not_write_the_same_place(hf_folder, tmp_path):
    held = pytest.raises(UserError, match=r"out\.partial: another process is writing there")
    with drafts.open_draft(tmp_path / "out", {"source": "x"}), held:
        convert(hf_folder, tmp_path / "out", report=silent, **SMALL)
    assert not (tmp_path / "out.partial").exists()


def test_mapped_hidden_states_give_the_same_manifest(hf_folder, whole, tmp_path, monkeypatch):
    mapped = []
    read = HiddenStates.read

    def watched(self, layer):
        x_NSD = read(self, layer)
        mapped.append(isinstance(x_NSD, np.memmap))
        return x_NSD

    monkeypatch.setattr(HiddenStates, "read", watched)
    convert(hf_folder, tmp_path / "out", report=silent, ram_bytes=1, **SMALL)
    assert mapped == [True, True]
    assert (tmp_path / "out" / "manifest.json").read_bytes() == whole[0]
    assert json.loads(whole[0])["format_version"] == 2
