# SPDX-License-Identifier: Apache-2.0
"""A paged checkpoint comes back bit for bit, and is there whole or not at all."""

import dataclasses
import errno
import hashlib
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint.experimental import v1 as ocp

from pagedweight_jax.checkpoint import draft as drafts
from pagedweight_jax.checkpoint import paged
from pagedweight_jax.checkpoint.draft import open_draft, save
from pagedweight_jax.checkpoint.manifest import from_json, page_name
from pagedweight_jax.checkpoint.paged import (
    INDEX_BYTES,
    READS_AHEAD,
    group_of,
    open_checkpoint,
    quiet_orbax,
    read_ahead,
    verify,
)
from pagedweight_jax.config import DOWN, GATE_UP
from pagedweight_jax.errors import UserError


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_was_written_comes_back(written, manifest, arrays):
    checkpoint = open_checkpoint(written)
    assert set(checkpoint.manifest.arrays) == set(arrays)
    for layer in range(manifest.config.num_sparse_layers):
        for kind in (GATE_UP, DOWN):
            for page in range(manifest.max_bits):
                pages = checkpoint.load_pages(layer, kind, page)
                assert pages.dtype == np.uint32
                np.testing.assert_array_equal(pages, arrays[page_name(layer, kind, page)])
    np.testing.assert_array_equal(checkpoint.sensitivity, arrays["calibration/sensitivity"], strict=True)
    np.testing.assert_array_equal(checkpoint.tokens, arrays["calibration/tokens"], strict=True)
    np.testing.assert_array_equal(checkpoint.uncalibrated, arrays["calibration/uncalibrated"], strict=True)
    np.testing.assert_array_equal(checkpoint.importance(DOWN), arrays["calibration/importance/down"], strict=True)
    assert dataclasses.replace(checkpoint.manifest, arrays={}) == manifest
    assert verify(written) == []


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_dense_weights_come_back(written, dense, dtype):
    loaded = open_checkpoint(written).load_dense(dtype)
    expected = jax.tree.map(lambda w: w.astype(dtype or w.dtype), dense)
    assert jax.tree.structure(loaded) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected)):
        assert mine.dtype == theirs.dtype
        assert jnp.array_equal(mine, theirs)


def test_two_writes_give_equal_manifests(written, manifest, groups, source_files, tmp_path):
    save(tmp_path / "again", manifest, groups, source_files)
    text = (written / "manifest.json").read_text()
    assert (tmp_path / "again" / "manifest.json").read_text() == text
    assert str(tmp_path.parent) not in text
    assert "time" not in json.loads(text)


def test_files_are_listed_as_sha256sum_reads_them(written):
    lines = (written / "files.sha256").read_text().splitlines()
    listed = dict(reversed(line.split("  ")) for line in lines)
    assert set(listed) == {str(name) for name in contents(written)} - {"files.sha256"}
    assert {"config.json", "manifest.json", "text/calibration.txt"} < set(listed)
    for name, digest in listed.items():
        assert hashlib.sha256((written / name).read_bytes()).hexdigest() == digest


# ---- atomicity ----


def test_an_existing_folder_is_refused(copy, manifest, groups, source_files):
    before = contents(copy)
    with pytest.raises(UserError, match="exists already"):
        save(copy, manifest, groups, source_files)
    assert contents(copy) == before


def test_overwrite_replaces_a_checkpoint_and_nothing_else(copy, manifest, groups, source_files, tmp_path):
    (copy / "stray").write_text("of the old one")
    (tmp_path / "tiny.replaced" / "arrays").mkdir(parents=True)  # of an overwrite that died
    save(copy, manifest, groups, source_files, overwrite=True)
    assert not (copy / "stray").exists()
    assert verify(copy) == []
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]

    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not a paged checkpoint"):
        save(tmp_path / "precious", manifest, groups, source_files, overwrite=True)
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "years of work"


def test_a_write_that_fails_leaves_nothing(manifest, groups, source_files, tmp_path):
    def failing():
        yield groups[0]
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        save(tmp_path / "out", manifest, failing(), source_files)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_overwrite_keeps_the_old_checkpoint(copy, manifest, source_files):
    def failing():
        raise RuntimeError("power cut")
        yield

    with pytest.raises(RuntimeError, match="power cut"):
        save(copy, manifest, failing(), source_files, overwrite=True)
    assert verify(copy) == []


def test_the_leftover_of_a_crash_is_no_checkpoint_and_is_replaced(written, manifest, groups, source_files, tmp_path):
    out, leftover = tmp_path / "out", tmp_path / "out.partial"
    shutil.copytree(written / "arrays", leftover / "arrays")
    (leftover / "stray").write_text("of the crash")
    with pytest.raises(UserError, match=r"no such folder \(out\.partial is of a conversion that did not finish\)"):
        open_checkpoint(out)
    with pytest.raises(UserError, match=r"no manifest\.json, so not a finished"):
        open_checkpoint(leftover)
    save(out, manifest, groups, source_files)
    assert verify(out) == []
    assert not leftover.exists()
    assert not (out / "stray").exists()


def test_arrays_that_do_not_fit_the_model_are_not_written(manifest, groups, source_files, tmp_path):
    short = groups[0] | {"pages/0/down/1": groups[0]["pages/0/down/1"][:-1]}
    with pytest.raises(UserError, match="array pages/0/down/1 is uint32"):
        save(tmp_path / "out", manifest, [short, *groups[1:]], source_files)
    assert list(tmp_path.iterdir()) == []


def stick(patch, module, name, stuck, code):
    """Makes ``module.name`` fail for one path, unless it is to ignore that."""
    works = getattr(module, name)

    def sticking(path, **options):
        if path != stuck:
            works(path, **options)
        elif not options.get("ignore_errors"):
            raise OSError(code, os.strerror(code), str(path))

    patch.setattr(module, name, sticking)


def convert(out, manifest, groups, files, overwrite=False):
    """As ``save``, but a finished step is kept."""
    with open_draft(out, {}, overwrite) as draft:
        draft.commit("all", groups, {})
        draft.publish(manifest, files, overwrite)


STICKS = {"draft": ("rmtree", "tiny.partial"), "old one": ("rmtree", "tiny.replaced"), "its name": ("sync", "")}


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC], ids=["denied", "full"])
@pytest.mark.parametrize(("name", "stuck"), STICKS.values(), ids=STICKS)
def test_an_error_behind_the_last_rename_says_that_the_checkpoint_is_complete(
    copy, manifest, groups, source_files, tmp_path, monkeypatch, name, stuck, code
):
    (copy / "stray").write_text("of the old one")
    with monkeypatch.context() as patch:
        stick(patch, drafts.shutil if name == "rmtree" else drafts, name, tmp_path / stuck, code)
        with pytest.raises(UserError) as raised:
            convert(copy, manifest, groups, source_files, overwrite=True)
    said = f"[Errno {code}] {os.strerror(code)}: '{tmp_path / stuck}'"
    assert str(raised.value) == f"{copy}: complete, but then: {said}; tiny.replaced and tiny.partial may be removed"
    assert not (copy / "stray").exists()
    assert verify(copy) == []
    save(copy, manifest, groups, source_files, overwrite=True)  # what is left is in nobody's way
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_an_error_before_the_last_rename_says_what_is_kept(manifest, groups, source_files, tmp_path, monkeypatch):
    out, partial = tmp_path / "tiny", tmp_path / "tiny.partial"
    stick(monkeypatch, drafts, "sync", partial / "checkpoint" / "manifest.json", errno.EACCES)
    with pytest.raises(UserError, match=r"denied.*; 1 finished steps are kept in tiny\.partial, run the same"):
        convert(out, manifest, groups, source_files)
    shutil.rmtree(partial)
    with pytest.raises(UserError, match=r"denied.*; nothing was written$"):
        save(out, manifest, groups, source_files)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("publishes", [True, False])
def test_a_draft_that_cannot_be_removed_hides_no_error(
    manifest, groups, source_files, tmp_path, monkeypatch, publishes
):
    stick(monkeypatch, drafts.shutil, "rmtree", tmp_path / "out.partial", errno.EACCES)
    groups = groups if publishes else [groups[0]]
    with pytest.raises(UserError, match="out: complete, but then" if publishes else "array .* is not listed"):
        save(tmp_path / "out", manifest, groups, source_files)
    assert (tmp_path / "out").exists() == publishes


# ---- reading ----


def test_every_array_is_read_straight_from_its_file(written, arrays, monkeypatch):
    """Byte for byte its values: no packing, no other array's bytes, and Orbax is not asked."""
    monkeypatch.setattr(paged.ocp, "load", lambda *args: pytest.fail("Orbax was asked"))
    checkpoint = open_checkpoint(written)
    for name, array in arrays.items():
        np.testing.assert_array_equal(checkpoint.load(name), array, strict=True)
        folders = (written / "arrays" / group_of(name)).glob(f"*/{name}/c")
        (file,) = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        assert file.read_bytes()[:-INDEX_BYTES] == array.tobytes()


def test_orbax_reads_every_group_as_a_checkpoint_of_its_own(written, arrays):
    for group in {group_of(name) for name in arrays}:
        with quiet_orbax():
            read = ocp.load(written / "arrays" / group)
        assert read.keys() == {name for name in arrays if group_of(name) == group}
        for name, array in read.items():
            np.testing.assert_array_equal(np.asarray(array), arrays[name], strict=True)


def test_packed_arrays_are_read_as_well(copy, groups, arrays):
    shutil.rmtree(copy / "arrays" / "pages" / "0")
    ocp.save(copy / "arrays" / "pages" / "0", groups[0])
    np.testing.assert_array_equal(open_page(copy, DOWN, 3), arrays[page_name(0, DOWN, 3)], strict=True)


def open_page(folder, kind, page):
    manifest = from_json((folder / "manifest.json").read_text())
    return paged.PagedCheckpoint(folder, manifest).load_pages(0, kind, page)


def test_pages_are_read_ahead_in_order(written, arrays):
    checkpoint = open_checkpoint(written)
    places = [(layer, kind, page) for layer in range(2) for kind in range(2) for page in range(4)]
    read = list(read_ahead(lambda place: checkpoint.load_pages(*place), places))
    assert [place for place, _ in read] == places
    for place, words in read:
        np.testing.assert_array_equal(words, arrays[page_name(*place)])


def test_reading_ahead_holds_few_and_tells_of_damage(written):
    begun = []

    def read(place):
        begun.append(place)
        if place == (0, 0, 9):
            raise UserError("array is damaged")
        return np.zeros(place)

    pages = read_ahead(read, [(0, 0, page) for page in range(20)])
    next(pages)
    assert len(begun) <= READS_AHEAD + 1
    with pytest.raises(UserError, match="damaged"):
        list(pages)
