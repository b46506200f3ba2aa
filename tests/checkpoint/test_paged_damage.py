# SPDX-License-Identifier: Apache-2.0
"""Every kind of damage to a paged checkpoint is found, and named in one line."""

import shutil

import numpy as np
import pytest

from pagedweight_jax.checkpoint.manifest import from_json
from pagedweight_jax.checkpoint.paged import PagedCheckpoint, open_checkpoint, verify
from pagedweight_jax.config import GATE_UP
from pagedweight_jax.errors import UserError


def largest_file(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip_bit(path, position, bit=0):
    octets = bytearray(path.read_bytes())
    octets[position] ^= 1 << bit
    path.write_bytes(octets)


def damage(folder):
    """(arrays, files) that ``verify`` names; the arrays must be refused by load, too, and all others be loaded."""
    problems = verify(folder)
    manifest = from_json((folder / "manifest.json").read_text())
    arrays = [name for name in manifest.arrays if any(f"array {name} is damaged" in p for p in problems)]
    files = [p.split(":")[0] for p in problems if "damaged or edited" in p or p.endswith(": missing")]
    assert len(arrays) + len(files) == len(problems)
    checkpoint = PagedCheckpoint(folder, manifest)
    for name in manifest.arrays:
        if name in arrays:
            with pytest.raises(UserError, match=f"array {name} is damaged"):
                checkpoint.load(name)
        else:
            checkpoint.load(name)
    return arrays, files


def test_an_undamaged_copy_verifies(copy):
    assert damage(copy) == ([], [])


@pytest.mark.parametrize("group", ["pages/0", "pages/1", "dense", "calibration"])
def test_a_flipped_bit_in_the_data_is_found(copy, group):
    """In the largest data file: somewhere in the arrays' compressed words."""
    path = largest_file(copy / "arrays" / group)
    flip_bit(path, path.stat().st_size // 4, bit=3)
    arrays, files = damage(copy)
    assert files == [str(path)]
    assert len(arrays) >= 1
    assert all(name.startswith(f"{group}/") for name in arrays)


def test_bits_that_decode_without_an_error_are_found_by_their_checksum(copy, groups):
    """Orbax reads this array gladly: only the checksum knows that it is another one."""
    from orbax.checkpoint.experimental import v1 as ocp

    flipped = groups[0]["pages/0/gate_up/2"].copy()
    flipped[1, 0, 5] ^= 1 << 17
    shutil.rmtree(copy / "arrays" / "pages" / "0")
    ocp.save(copy / "arrays" / "pages" / "0", groups[0] | {"pages/0/gate_up/2": flipped})
    checkpoint = PagedCheckpoint(copy, from_json((copy / "manifest.json").read_text()))
    with pytest.raises(UserError, match=r"pages/0/gate_up/2 .* checksum"):
        checkpoint.load_pages(0, GATE_UP, 2)
    checkpoint.load_pages(0, GATE_UP, 1)


def test_no_flipped_bit_anywhere_gives_other_arrays(copy, arrays):
    """Any file, any place: the array is refused, or it is still the one that was written."""
    rng = np.random.default_rng(1)
    folder = copy / "arrays" / "calibration"
    found = 0
    for path in [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]:
        intact = path.read_bytes()
        for position in rng.integers(0, len(intact), 4):
            flip_bit(path, position, int(rng.integers(8)))
            checkpoint = open_checkpoint(copy)
            for name in [name for name in arrays if name.startswith("calibration/")]:
                try:
                    np.testing.assert_array_equal(checkpoint.load(name), arrays[name], strict=True)
                except UserError:
                    found += 1
            path.write_bytes(intact)
    assert found > 10
    assert verify(copy) == []


@pytest.mark.parametrize("how", ["truncate", "empty", "remove"])
def test_a_short_or_missing_data_file_is_found(copy, how):
    path = largest_file(copy / "arrays" / "dense")
    if how == "remove":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 0 if how == "empty" else path.stat().st_size // 4])
    arrays, files = damage(copy)
    assert files == [str(path)]
    assert len(arrays) >= 1
    if how == "remove":
        with pytest.raises(UserError, match=f"{path.name}: missing"):
            open_checkpoint(copy)
    else:
        with pytest.raises(UserError, match=f"{path.name}: damaged"):
            open_checkpoint(copy).load_dense()


def test_a_missing_array_folder_is_found(copy, manifest):
    shutil.rmtree(copy / "arrays" / "pages" / "1")
    with pytest.raises(UserError, match=r"arrays/pages/1/\S+: missing"):
        open_checkpoint(copy)
    arrays, _ = damage(copy)
    assert len(arrays) == 2 * manifest.max_bits


@pytest.mark.parametrize("how", ["flip", "remove"])
@pytest.mark.parametrize("name", ["config.json", "text/calibration.txt"])
def test_a_damaged_or_missing_file_is_found(copy, name, how):
    if how == "flip":
        flip_bit(copy / name, 1)
    else:
        (copy / name).unlink()
    match = f"{name}: {'damaged' if how == 'flip' else 'missing'}"
    with pytest.raises(UserError, match=match):
        open_checkpoint(copy)
    (problem,) = verify(copy)
    assert match in problem


def test_a_missing_or_empty_list_of_checksums_is_found(copy):
    (copy / "files.sha256").write_text("")
    with pytest.raises(UserError, match=r"files\.sha256: does not list manifest\.json"):
        open_checkpoint(copy)
    (copy / "files.sha256").unlink()
    with pytest.raises(UserError, match=r"files\.sha256: cannot be read"):
        open_checkpoint(copy)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "text/../../secret"])
def test_a_listed_file_outside_the_folder_is_refused(copy, name):
    (copy.parent / "secret").write_text("not ours")
    with (copy / "files.sha256").open("a") as file:
        file.write(f"{'0' * 64}  {name}\n")
    with pytest.raises(UserError, match=rf"files\.sha256: lists {name}, which is not in the folder"):
        open_checkpoint(copy)
    assert any("which is not in the folder" in problem for problem in verify(copy))
