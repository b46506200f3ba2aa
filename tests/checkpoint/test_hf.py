# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: every tensor is where it belongs, and what is missing, left over or another's is named."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from pagedweight_jax.checkpoint.hf import load_config, load_weights, open_source, read_layer, read_outer
from pagedweight_jax.errors import UserError
from pagedweight_jax.models.weights import MLPWeights

SINGLE = "model.safetensors"
EMBED = "model.embed_tokens.weight"
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"


def leaves_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


def test_every_array_is_the_named_tensor(saved):
    root, tensors = saved
    weights = load_weights(root / "single", load_config(root / "single"), jnp.float32)
    np.testing.assert_array_equal(weights.embed_VD, tensors[EMBED])
    np.testing.assert_array_equal(weights.lm_head_DV, tensors["lm_head.weight"].T)
    np.testing.assert_array_equal(weights.norm_D, tensors["model.norm.weight"])
    used = 3
    for l, layer in enumerate(weights.layers):
        prefix = f"model.layers.{l}."
        theirs = {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}
        ours = {
            "input_layernorm.weight": layer.input_norm_D,
            "post_attention_layernorm.weight": layer.post_attention_norm_D,
            "self_attn.o_proj.weight": layer.attention.o_ND.T,
            **{f"self_attn.{n}_proj.weight": getattr(layer.attention, f"{n}_DN").T for n in "qkv"},
            **{f"self_attn.{n}_proj.bias": getattr(layer.attention, f"{n}_bias_N") for n in "qkv"},
        }
        dense, prefix = (layer.mlp, "mlp") if l == 1 else (layer.mlp.shared, "mlp.shared_expert")
        assert isinstance(dense, MLPWeights)
        for name, matrix in (("gate", dense.gate_DF), ("up", dense.up_DF), ("down", dense.down_FD)):
            ours[f"{prefix}.{name}_proj.weight"] = matrix.T
        if l != 1:
            ours["mlp.gate.weight"] = layer.mlp.router_DE.T
            ours["mlp.shared_expert_gate.weight"] = layer.mlp.shared_gate_D[None]
            for e in range(4):
                ours[f"mlp.experts.{e}.gate_proj.weight"] = layer.mlp.experts.gate_up_ENC[e, :32]
                ours[f"mlp.experts.{e}.up_proj.weight"] = layer.mlp.experts.gate_up_ENC[e, 32:]
                ours[f"mlp.experts.{e}.down_proj.weight"] = layer.mlp.experts.down_ENC[e]
        assert ours.keys() == theirs.keys()
        for name, array in ours.items():
            np.testing.assert_array_equal(array, theirs[name], err_msg=name)
        used += len(ours)
    assert used == len(tensors)


def fuse(tensors):
    """The experts of every layer in two tensors, as transformers has them in memory."""
    prefixes = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for prefix in prefixes:
        experts = {}
        for name in [name for name in tensors if name.startswith(f"{prefix}.experts.")]:
            expert, part = name.removeprefix(f"{prefix}.experts.").removesuffix(".weight").split(".")
            experts[int(expert), part] = tensors.pop(name)
        gate, up, down = (np.stack([experts[e, f"{part}_proj"] for e in range(4)]) for part in ("gate", "up", "down"))
        tensors[f"{prefix}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{prefix}.experts.down_proj"] = down


def test_fused_experts_give_the_same(single, edit, error_of):
    weights = load_weights(single, load_config(single), jnp.float32)
    edit(single / SINGLE, fuse)
    assert leaves_equal(weights, load_weights(single, load_config(single), jnp.float32))
    both = "model.layers.0.mlp.experts.3.down_proj.weight"
    edit(single / SINGLE, lambda tensors: tensors.update({both: tensors[EMBED]}))
    assert f"left over 1 tensor ({both})" in error_of(single)


def test_shards_and_layers_give_the_same_as_one_file(saved):
    root, _ = saved
    assert len(list((root / "sharded").glob("*.safetensors"))) > 3
    config = load_config(root / "sharded")
    whole = load_weights(root / "single", config, jnp.float32)
    assert leaves_equal(whole, load_weights(root / "sharded", config, jnp.float32))
    source = open_source(root / "sharded", config)
    layers = [read_layer(source, layer, np.float32) for layer in range(config.num_layers)]
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(layers))
    assert leaves_equal(tuple(layers), whole.layers)
    assert leaves_equal(read_layer(source, 2), whole.layers[2])
    assert not leaves_equal(read_layer(source, 0), whole.layers[2])
    outer = read_outer(source)
    assert outer.layers == ()
    assert leaves_equal(outer, replace(whole, layers=()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_in_the_file(dtype, save_hf, tmp_path):
    model = save_hf(tmp_path, dtype=dtype)
    config = load_config(tmp_path)
    source = open_source(tmp_path, config)
    kept, exact = read_layer(source, 0), read_layer(source, 0, np.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(kept)} == {np.dtype(getattr(ml_dtypes, dtype, dtype))}
    theirs = model.model.layers[0].mlp.experts.gate_up_proj
    assert theirs.dtype == getattr(torch, dtype)
    np.testing.assert_array_equal(exact.mlp.experts.gate_up_ENC, theirs.detach().float().numpy())
    weights = load_weights(tmp_path, config)
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(weights.layers[0].attention.q_DN, exact.attention.q_DN.astype(ml_dtypes.bfloat16))


def test_missing_and_left_over_tensors_are_listed(single, edit, error_of):
    def change(tensors):
        for e in range(4):
            del tensors[f"model.layers.0.mlp.experts.{e}.gate_proj.weight"]
        tensors["model.layers.1.mlp.gate.weight"] = np.zeros((4, 64), np.float32)

    edit(single / SINGLE, change)
    message = error_of(single)
    assert "missing 4 tensors (model.layers.0.mlp.experts.0.gate_proj.weight, " in message
    assert "experts.2.gate_proj.weight, ...)" in message
    assert "left over 1 tensor (model.layers.1.mlp.gate.weight)" in message


def test_a_configuration_of_other_depth_is_refused(single, edit_json, error_of):
    edit_json(single / "config.json", lambda raw: raw.update(num_hidden_layers=2, layer_types=None))
    assert "left over 26 tensors (model.layers.2." in error_of(single)


def test_a_senseless_number_of_experts_is_refused_at_once(single, edit_json, error_of):
    edit_json(single / "config.json", lambda raw: raw.update(num_experts=10**12))
    assert "config.json asks for 2000000000000 tensors in layers.0.mlp.experts.gate_up_ENC" in error_of(single)


@pytest.mark.parametrize("name", [EXPERT, EMBED, "model.layers.0.mlp.shared_expert_gate.weight"])
def test_a_wrong_shape_names_tensor_found_and_expected(name, single, saved, edit, error_of):
    shape = saved[1][name].shape
    edit(single / SINGLE, lambda tensors: tensors.update({name: np.ascontiguousarray(tensors[name].T)}))
    assert f"tensor {name} has shape {shape[::-1]}, expected {shape}" in error_of(single)


def test_a_wrong_dtype_is_refused(single, edit, error_of):
    edit(single / SINGLE, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].astype(np.int8)}))
    assert f"tensor {EXPERT} is I8; supported: F32, F16, BF16" in error_of(single)


def test_experts_of_several_dtypes_are_refused(single, edit):
    edit(single / SINGLE, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].astype(np.float16)}))
    with pytest.raises(UserError, match=f"tensor {EXPERT} is F16, but model.layers.2.mlp.experts.0.* beside it is F32"):
        open_source(single, load_config(single))


def test_a_vision_tower_is_skipped_and_said(single, saved, edit):
    tower = {"visual.patch_embed.proj.weight": np.ones((3, 3), np.float32), "model.vision_tower.norm": np.ones(3, "f4")}
    edit(single / SINGLE, lambda tensors: tensors.update(tower))
    lines = []
    source = open_source(single, load_config(single), lines.append)
    (line,) = lines
    assert "skipped 2 tensors (model.vision_tower.norm, visual.patch_embed.proj.weight): a vision tower" in line
    assert read_layer(source, 2).mlp.experts.down_ENC.shape == (4, 64, 32)


def test_rotary_buffers_are_skipped_and_said(single, saved, capsys, edit):
    def change(tensors):
        for l in range(3):
            tensors[f"model.layers.{l}.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    edit(single / SINGLE, change)
    config = load_config(single)
    weights = load_weights(single, config, jnp.float32)
    assert "skipped 3 tensors (model.layers.0.self_attn.rotary_emb.inv_freq, " in capsys.readouterr().out
    lines = []
    assert leaves_equal(weights, load_weights(saved[0] / "single", config, jnp.float32, report=lines.append))
    assert lines == []


def test_tied_embeddings(save_hf, tmp_path, capsys, edit_json, edit, error_of):
    save_hf(tmp_path, tie_word_embeddings=True, num_hidden_layers=1)
    config = load_config(tmp_path)
    weights = load_weights(tmp_path, config, jnp.float32)
    assert weights.lm_head_DV is None
    edit(tmp_path / SINGLE, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBED].copy()}))
    assert leaves_equal(weights, load_weights(tmp_path, config, jnp.float32))
    assert "skipped 1 tensor (lm_head.weight): the head is the tied embedding" in capsys.readouterr().out
    edit(tmp_path / SINGLE, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBED] + 1}))
    assert f"tie_word_embeddings is set, but lm_head.weight differs from {EMBED}" in error_of(tmp_path)
    edit_json(tmp_path / "config.json", lambda raw: raw.update(tie_word_embeddings=False))
    assert not np.array_equal(load_weights(tmp_path, load_config(tmp_path)).lm_head_DV.T, weights.embed_VD)


def test_end_tokens_of_the_generation_config_win(single, edit_json):
    generation = single / "generation_config.json"
    edit_json(single / "config.json", lambda raw: raw.update(eos_token_id=5))
    generation.write_text('{"eos_token_id": [6, 5]}')
    assert load_config(single).eos_token_ids == (6, 5)
    generation.write_text("{}")
    assert load_config(single).eos_token_ids == (5,)
    generation.unlink()
    assert load_config(single).eos_token_ids == (5,)


def test_the_configuration_of_transformers_4_reads_the_same(single, edit_json):
    new = load_config(single)
    edit_json(single / "config.json", lambda raw: raw.update(rope_theta=raw.pop("rope_parameters")["rope_theta"]))
    edit_json(single / "config.json", lambda raw: raw.pop("layer_types"))
    assert load_config(single) == new
