# SPDX-License-Identifier: Apache-2.0
"""Folders whose files are damaged, contradict one another, or change while they are read."""

import json
import shutil
import struct

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from pagedweight_jax.checkpoint.hf import load_config, load_weights, open_source, read_layer, read_outer
from pagedweight_jax.checkpoint.tensors import read_into
from pagedweight_jax.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize("how", ["cut short", "another shape", "gone"])
def test_a_file_that_changes_while_it_is_read_is_noticed(single, how, edit):
    source = open_source(single, load_config(single))
    if how == "cut short":
        (single / SINGLE).write_bytes((single / SINGLE).read_bytes()[:-64])
    elif how == "another shape":
        edit(single / SINGLE, lambda tensors: tensors.update({EXPERT: tensors[EXPERT][:-1]}))
    else:
        edit(single / SINGLE, lambda tensors: tensors.pop(EXPERT))
    last_or_edited = (lambda: read_outer(source)) if how == "cut short" else (lambda: read_layer(source, 2))
    with pytest.raises(UserError, match=rf"{SINGLE}: tensor \S+ is cut short or has changed while it was read"):
        last_or_edited()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(save_hf, tmp_path, dtype, value, edit):
    save_hf(tmp_path, dtype=dtype, num_hidden_layers=3)

    def spoil(tensors):
        tensors[EXPERT][4, 3] = value

    edit(tmp_path / SINGLE, lambda tensors: tensors[EXPERT].fill(np.finfo(np.float16).max))
    source = open_source(tmp_path, load_config(tmp_path))
    read_layer(source, 2)
    edit(tmp_path / SINGLE, spoil)
    with pytest.raises(UserError, match=f"tensor {EXPERT}, row 4 has a weight that is NaN or infinite"):
        read_layer(source, 2)


def test_an_expert_of_a_fused_tensor_is_named(tmp_path):
    w_ENC = np.zeros((3, 8, 64), np.float32)
    w_ENC[2, 5, 63] = np.inf
    norm_D = np.array([1, np.nan], np.float32)
    save_file({"experts": w_ENC, "norm": norm_D}, tmp_path / SINGLE)
    with pytest.raises(UserError, match="tensor experts, expert 2, row 5 has"):
        read_into([(tmp_path / SINGLE, "experts", np.empty_like(w_ENC))])
    with pytest.raises(UserError, match="tensor norm has"):
        read_into([(tmp_path / SINGLE, "norm", np.empty_like(norm_D))])


def with_header(header, data=b""):
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize(
    "damage",
    {
        "truncated": lambda good: good[:-1],
        "longer": lambda good: good + b"\0",
        "empty": lambda good: b"",
        "cut in the length": lambda good: good[:5],
        "cut in the header": lambda good: good[:100],
        "absurd header length": lambda good: struct.pack("<Q", 1 << 60) + good[8:],
        "header is not JSON": lambda good: good[:8] + b"<" + good[9:],
        "header without offsets": lambda good: with_header(b'{"a":3}'),
        "offsets beyond the end": lambda good: with_header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
        "shape against offsets": lambda good: with_header(
            b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', b"\0" * 8
        ),
    }.items(),
    ids=lambda item: item[0],
)
def test_damaged_files(damage, single, error_of):
    path = single / SINGLE
    path.write_bytes(damage[1](path.read_bytes()))
    assert f"{path} is damaged or not a safetensors file" in error_of(single)


def test_an_undamaged_copy_loads(single, saved):
    path = single / SINGLE
    path.write_bytes(path.read_bytes())
    config = load_config(single)
    weights, expected = load_weights(single, config), load_weights(saved[0] / "single", config)
    jax.tree.map(np.testing.assert_array_equal, weights, expected)


def test_index_errors(sharded, error_of):
    index = sharded / INDEX
    good = json.loads(index.read_text())
    shard = good["weight_map"][EXPERT]

    def error_with(weight_map):
        index.write_text(json.dumps({"weight_map": weight_map}))
        return error_of(sharded)

    other = next(name for name in good["weight_map"].values() if name != shard)
    moved = error_with(good["weight_map"] | {EXPERT: other})
    assert f"tensor {EXPERT} is not in {other}, where the index puts it" in moved
    assert "the checkpoint's index names it" in error_with(good["weight_map"] | {"a": "b.safetensors"})
    assert "must name a file of the same folder, got '../x'" in error_with(good["weight_map"] | {EXPERT: "../x"})
    assert "weight_map is missing or empty" in error_with({})
    index.write_text("{")
    assert f"{index} is not readable JSON" in error_of(sharded)
    index.write_text(json.dumps(good))
    (sharded / shard).unlink()
    assert f"{sharded / shard} does not exist" in error_of(sharded)
    index.unlink()
    assert "holds neither" in error_of(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded, saved, edit, error_of):
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    other = next(name for name in sorted(set(weight_map.values())) if name != weight_map[EXPERT])
    edit(sharded / other, lambda tensors: tensors.update({EXPERT: saved[1][EXPERT]}))
    message = error_of(sharded)
    assert f"tensor {EXPERT} is in both" in message
    assert other in message
    assert weight_map[EXPERT] in message


def test_two_checkpoints_in_one_folder_are_refused(single, sharded, error_of):
    shutil.copy(single / SINGLE, sharded)
    assert "holds both" in error_of(sharded)


def test_config_errors_name_the_file(single, tmp_path, edit_json, error_of):
    path = single / "config.json"
    edit_json(path, lambda raw: raw.update(model_type="gpt2"))
    assert f"{path}: model_type 'gpt2' is not supported" in error_of(single)
    path.write_text("[]")
    assert f"{path} must hold a JSON object, got list" in error_of(single)
    path.write_bytes(b"\xff\xfe")
    assert f"{path} is not readable JSON" in error_of(single)
    path.unlink()
    assert f"{path} does not exist" in error_of(single)
    assert "nowhere is not a folder" in error_of(tmp_path / "nowhere")
