# SPDX-License-Identifier: Apache-2.0
"""A manifest of another format, version, model or file is refused in one line that names it."""

import hashlib
import json

import pytest

from pagedweight_jax.checkpoint.paged import open_checkpoint, verify
from pagedweight_jax.errors import UserError


def edit(folder, change):
    """Edits the manifest as somebody would who also mends its checksum."""
    path = folder / "manifest.json"
    fields = json.loads(path.read_text())
    change(fields)
    old, new = path.read_bytes(), json.dumps(fields, indent=1).encode() + b"\n"
    path.write_bytes(new)
    files = folder / "files.sha256"
    digests = [hashlib.sha256(text).hexdigest() for text in (old, new)]
    files.write_text(files.read_text().replace(*digests))


def test_an_edit_that_changes_nothing_is_accepted(copy):
    edit(copy, lambda fields: None)
    assert verify(copy) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.update(format="safetensors"), "not a pagedweight checkpoint"),
        (lambda f: f.pop("format"), "not a pagedweight checkpoint"),
        (lambda f: f.update(format_version=1), "format_version 1 is not supported, this version reads 2"),
        (lambda f: f.update(layout_version=99), "layout_version 99 is not supported, this version reads 1"),
        (lambda f: f.pop("layout_version"), "layout_version None is not supported"),
        (lambda f: f["arrays"]["pages/0/down/2"].update(shape=[4, 1, 128]), r"array pages/0/down/2 is uint32\[4, 1"),
        (lambda f: f["arrays"]["dense/norm_D"].update(dtype="int8"), r"array dense/norm_D is int8\[64\]"),
        (lambda f: f["arrays"].pop("calibration/tokens"), "array calibration/tokens is not listed"),
        (lambda f: f["arrays"].update({"pages/2/down/0": f["arrays"]["pages/0/down/0"]}), "pages/2/down/0 does not"),
        (lambda f: f["arrays"]["dense/norm_D"].update(crc32=7), "array dense/norm_D is damaged"),
        (lambda f: f["config"].pop("num_experts"), r"malformed \(TypeError.*num_experts"),
        (lambda f: f["config"].update(num_layers="two"), "malformed"),
        (lambda f: f["config"].update(num_layers=10**12), "malformed.*: 1000000000000 layers, 2 in sparse_layers"),
        (lambda f: f["config"].update(sparse_layers=[True]), "malformed.*: 2 layers, 1 in sparse_layers, 2 in windows"),
        (lambda f: f["config"]["windows"].append(0), "malformed.*: 2 layers, 2 in sparse_layers, 3 in windows"),
        (lambda f: f["config"].update(moe_intermediate_size=64), r"array pages/0/gate_up/0 is uint32"),
        (lambda f: f["config"].update(rms_norm=1), r"malformed \(TypeError.*rms_norm"),
        (lambda f: f.update(max_bits=9), r"bits 2\.\.9"),
        (lambda f: f.update(frame_bytes=1000), "malformed.*power of two"),
        (lambda f: f.update(arrays=[]), "malformed"),
    ],
)
def test_a_wrong_manifest_is_refused(copy, change, message):
    edit(copy, change)
    with pytest.raises(UserError, match=message) as caught:
        open_checkpoint(copy).load_dense()
    assert "\n" not in str(caught.value)
    assert str(copy) in str(caught.value)


def test_a_flipped_bit_in_the_manifest_is_found(copy):
    """A number that nothing else contradicts: only the file's own checksum knows."""
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-02'))
    with pytest.raises(UserError, match=r"manifest\.json: damaged or edited"):
        open_checkpoint(copy)
    path.write_text(path.read_text()[:-40])
    with pytest.raises(UserError, match=r"manifest\.json: not JSON"):
        open_checkpoint(copy)


def test_folders_that_are_no_checkpoints_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no manifest\.json"):
        open_checkpoint(tmp_path)
