# SPDX-License-Identifier: Apache-2.0
"""A conversion holds what the quantizer made of the source, and refuses what it cannot convert in one line."""

import hashlib
import json
import shutil
import threading
import weakref
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.calibrate import convert as conversion
from pagedweight_jax.calibrate.any_precision import dequantize, quantize
from pagedweight_jax.calibrate.convert import convert
from pagedweight_jax.calibrate.sensitivity import sensitivity
from pagedweight_jax.calibrate.text import choose_sequences, tokenize
from pagedweight_jax.checkpoint.draft import Draft
from pagedweight_jax.checkpoint.hf import load_config, load_weights
from pagedweight_jax.checkpoint.paged import open_checkpoint, verify
from pagedweight_jax.config import DOWN, GATE_UP
from pagedweight_jax.errors import UserError
from pagedweight_jax.models.weights import without_experts
from pallas_kernels.bitplane import dequantize_pages

SMALL = {"bits": (2, 4), "samples": 8, "sequence_length": 64}


def silent(line):
    pass


@pytest.fixture(scope="module")
def converted(hf_folder, tmp_path_factory):
    return convert(hf_folder, tmp_path_factory.mktemp("paged") / "tiny", report=silent, **SMALL)


@pytest.fixture(scope="module")
def source(hf_folder):
    return load_weights(hf_folder, load_config(hf_folder), None, silent)


@pytest.fixture
def folder(hf_folder, tmp_path):
    """A copy of the source that a test may break."""
    return shutil.copytree(hf_folder, tmp_path / "hf")


def edit_json(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def source_blocks(weights, layer, kind):
    experts = weights.layers[layer].mlp.experts
    return np.asarray(experts.gate_up_ENC if kind == GATE_UP else experts.down_ENC, np.float32)


def stored_block(checkpoint, layer, kind, expert, bits):
    layout = checkpoint.manifest.layouts()[kind]
    pages = [jnp.asarray(checkpoint.load_pages(layer, kind, page)[expert]) for page in range(bits)]
    return np.asarray(dequantize_pages(pages, layout))


@pytest.mark.parametrize("kind", [GATE_UP, DOWN])
def test_pages_hold_the_quantized_weights(converted, source, kind):
    """Every bitwidth is exactly the quantizer's, and nearer to the source than the one below."""
    w_ENC = source_blocks(source, 1, kind)
    quantized = quantize(w_ENC, converted.importance(kind)[1], 2, 4)
    errors = []
    for bits in (2, 3, 4):
        stored_NC = stored_block(converted, 1, kind, 3, bits)
        np.testing.assert_array_equal(stored_NC, dequantize(quantized, bits)[3])
        errors.append(np.linalg.norm(stored_NC - w_ENC[3]) / np.linalg.norm(w_ENC[3]))
    assert errors[0] > 1.5 * errors[1] > 1.5 * 1.5 * errors[2]
    assert errors[2] < 0.12
    other_NC = source_blocks(source, 0, kind)[3]
    assert np.linalg.norm(stored_block(converted, 1, kind, 3, 4) - other_NC) > np.linalg.norm(other_NC)


def test_dense_weights_are_the_source_untouched(converted, source):
    loaded, expected = converted.load_dense(), without_experts(source)
    assert jax.tree.structure(loaded) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected)):
        assert mine.dtype == theirs.dtype
        assert jnp.array_equal(mine, theirs)


def test_sensitivities_belong_to_their_blocks(converted, source):
    s_LEUQ = converted.sensitivity
    assert s_LEUQ.shape == (2, 4, 2, 3)
    assert (s_LEUQ > 0).all()
    assert (s_LEUQ[..., :-1] > s_LEUQ[..., 1:]).all()
    for layer in range(2):
        for kind in (GATE_UP, DOWN):
            w_ENC, importance_EC = source_blocks(source, layer, kind), converted.importance(kind)[layer]
            expected_EQ = sensitivity(w_ENC, quantize(w_ENC, importance_EC, 2, 4), importance_EC, 2, 4)
            np.testing.assert_array_equal(s_LEUQ[layer, :, kind], expected_EQ)


def test_coverage_is_recorded(converted):
    tokens_LE = converted.tokens
    assert (tokens_LE.sum(axis=1) == 8 * 64 * 2).all()
    np.testing.assert_array_equal(converted.uncalibrated, tokens_LE < 32)
    assert converted.manifest.calibration.uncalibrated_experts == converted.uncalibrated.sum()


def test_files_are_carried_along(converted, hf_folder):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "text/calibration.txt"):
        assert (converted.path / name).read_bytes() == (hf_folder / name).read_bytes()
    assert not list(converted.path.rglob("*.safetensors"))
    assert verify(converted.path) == []


def test_the_same_input_gives_the_same_manifest_and_another_seed_does_not(converted, hf_folder, tmp_path):
    convert(hf_folder, tmp_path / "again", report=silent, **SMALL)
    assert (tmp_path / "again" / "manifest.json").read_bytes() == (converted.path / "manifest.json").read_bytes()
    other = convert(hf_folder, tmp_path / "other", report=silent, seed=1, **SMALL)
    assert other.manifest.arrays != converted.manifest.arrays
    text = (hf_folder / "text" / "calibration.txt").read_bytes()
    assert other.manifest.calibration.text_sha256 == hashlib.sha256(text).hexdigest()


def test_dense_layers_and_bfloat16_keep_their_places(save_hf, save_tokenizer, hf_folder, tmp_path):
    """Sparse layer 0 of this model is its layer 1."""
    folder = tmp_path / "hf"
    save_hf(folder, dtype="bfloat16", mlp_only_layers=[0], num_hidden_layers=3)
    save_tokenizer(folder)
    checkpoint = convert(
        folder, tmp_path / "out", text=hf_folder / "text" / "calibration.txt", report=silent, **SMALL | {"bits": (3, 3)}
    )
    assert checkpoint.manifest.config.sparse_layers == (False, True, True)
    weights = load_weights(folder, checkpoint.manifest.config, None, silent)
    for sparse_layer, layer in enumerate((1, 2)):
        w_NC = source_blocks(weights, layer, DOWN)[2]
        assert np.linalg.norm(stored_block(checkpoint, sparse_layer, DOWN, 2, 3) - w_NC) < 0.3 * np.linalg.norm(w_NC)
    loaded = checkpoint.load_dense()
    assert loaded.layers[0].mlp.gate_DF.dtype == jnp.bfloat16
    assert jnp.array_equal(loaded.layers[0].mlp.down_FD, weights.layers[0].mlp.down_FD)
    assert not (checkpoint.path / "text").exists()


def test_experts_out_of_reach_are_counted_and_said(hf_folder, tmp_path):
    lines = []
    checkpoint = convert(hf_folder, tmp_path / "out", bits=(3, 3), samples=1, sequence_length=8, report=lines.append)
    assert checkpoint.manifest.calibration.uncalibrated_experts == 8
    assert any("8 of 8 experts saw fewer than 32 calibration tokens" in line for line in lines)
    assert any(line == f"calibration text: {hf_folder / 'text' / 'calibration.txt'}" for line in lines)
    assert (checkpoint.sensitivity > 0).all()


def test_progress_counts_every_stage_to_its_end(hf_folder, tmp_path):
    last = {}

    def progress(stage, done, total):
        assert 0 <= done <= total
        assert done >= last.get(stage, (0, total))[0]
        last[stage] = (done, total)

    convert(hf_folder, tmp_path / "out", report=silent, progress=progress, **SMALL)
    assert last == {"calibrate": (16, 16), "quantize": (4, 4)}


def test_the_disk_works_beside_the_arithmetic_and_holds_one_layer(
    save_hf, save_tokenizer, hf_folder, tmp_path, monkeypatch
):
    """Layer 2 is not read before layer 0 is written and gone, but layer 1 while layer 0 is computed."""
    folder, events, arrived, pages = tmp_path / "hf", [], [threading.Event() for _ in range(3)], []
    save_hf(folder, num_hidden_layers=3)
    save_tokenizer(folder)
    read_layer, convert_layer, commit = conversion.hf.read_layer, conversion.convert_layer, Draft.commit

    def read(source, layer):
        assert all(page() is None for page in pages[: max(0, layer - 1)]), "what is written is still in memory"
        w = read_layer(source, layer)
        events.append(f"read {layer}")
        arrived[layer].set()
        return w

    def compute(w, manifest, layer, *arguments):
        assert arrived[min(layer + 1, 2)].wait(timeout=60), "the next layer is not read meanwhile"
        groups, remember = convert_layer(w, manifest, layer, *arguments)
        pages.append(weakref.ref(groups[0][f"pages/{layer}/down/0"]))
        return groups, remember

    def write(draft, step, *arguments):
        commit(draft, step, *arguments)
        events.append(f"wrote {step}")

    monkeypatch.setattr(conversion.hf, "read_layer", read)
    monkeypatch.setattr(conversion, "convert_layer", compute)
    monkeypatch.setattr(Draft, "commit", write)
    text = hf_folder / "text" / "calibration.txt"
    assert verify(convert(folder, tmp_path / "out", text=text, report=silent, **SMALL | {"bits": (3, 3)}).path) == []
    layers = ["read 0", "read 1", "wrote layer-0000", "read 2", "wrote layer-0001", "wrote layer-0002"]
    assert events == ["wrote outer", *layers, "wrote calibration"]


# ---- refusals ----


def test_an_existing_output_is_refused_before_any_work(converted, hf_folder):
    with pytest.raises(UserError, match="exists already"):
        convert(hf_folder, converted.path, report=silent, **SMALL)
    assert verify(converted.path) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"bits": (0, 4)}, r"bits 0\.\.4: need 1 <= lowest <= highest <= 8"),
        ({"bits": (5, 3)}, r"bits 5\.\.3"),
        ({"bits": (9, 9)}, r"bits 9: need"),
        ({"bits": (3, 9)}, r"bits 3\.\.9"),
        ({"samples": 65}, "too short: 4096 tokens are 64 sequences of 64, need 65"),
        ({"samples": 0}, "calibration: samples: 0 is less than 1"),
        ({"seed": -1}, "calibration: seed: -1 is less than 0"),
        ({"sequence_length": 513}, "sequences of 513 tokens exceed the model's context of 512"),
    ],
)
def test_wrong_numbers_are_refused(hf_folder, tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        convert(hf_folder, tmp_path / "out", report=silent, **SMALL | overrides)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 48, "head_dim": 16}, "layer 0 gate_up 64x48: a bit-plane needs columns in multiples of 32"),
        ({"moe_intermediate_size": 40}, "layer 0 down 64x40: a bit-plane needs columns in multiples of 32"),
        ({"model_type": "llama"}, "llama"),
    ],
)
def test_models_that_cannot_be_converted_are_refused(folder, tmp_path, fields, message):
    edit_json(folder / "config.json", **fields)
    with pytest.raises(UserError, match=message):
        convert(folder, tmp_path / "out", report=silent, **SMALL)


def test_a_text_must_be_there_and_be_text(folder, tmp_path):
    (folder / "text" / "calibration.txt").unlink()
    with pytest.raises(UserError, match="no calibration text: give one with --text"):
        convert(folder, tmp_path / "out", report=silent, **SMALL)
    with pytest.raises(UserError, match=r"nowhere\.txt: no such file"):
        convert(folder, tmp_path / "out", text=tmp_path / "nowhere.txt", report=silent, **SMALL)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="binary: cannot be read as UTF-8"):
        convert(folder, tmp_path / "out", text=tmp_path / "binary", report=silent, **SMALL)


def test_a_tokenizer_must_be_there_and_be_the_models(folder, tmp_path):
    edit_json(folder / "config.json", vocab_size=64)
    with pytest.raises(UserError, match=r"the tokenizer gives token \d+, the model has 64"):
        convert(folder, tmp_path / "out", report=silent, **SMALL)
    good = (folder / "tokenizer.json").read_text()
    for damaged in ("{}", good[:-9], good.replace('"WordLevel"', '"Word"'), good.replace('"Split"', '"Cut"')):
        assert damaged != good
        (folder / "tokenizer.json").write_text(damaged)
        with pytest.raises(UserError, match="no tokenizer that can be loaded"):
            convert(folder, tmp_path / "out", report=silent, **SMALL)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer \(none of tokenizer\.json"):
        convert(folder, tmp_path / "out", report=silent, **SMALL)


def test_a_full_disk_is_noticed_first(hf_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"the conversion takes up to [\d.]+ [KM]iB of disk, 0.98 KiB are free"):
        convert(hf_folder, tmp_path / "out", report=silent, **SMALL)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            "model.layers.1.mlp.experts.2.down_proj.weight",
            r"tensor model\.layers\.1\.mlp\.experts\.2\.down_proj\.weight, row 5 has a weight that is NaN or infinite",
        ),
        ("model.layers.1.self_attn.q_proj.weight", r"model\.layers\.1\.self_attn\.q_proj\.weight, row 5 has"),
        ("model.embed_tokens.weight", r"model\.embed_tokens\.weight, row 5 has"),
    ],
)
def test_weights_that_are_not_numbers_are_named(folder, tmp_path, tensor, message):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors[tensor][5, 7] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=message):
        convert(folder, tmp_path / "out", report=silent, **SMALL)
    assert not (tmp_path / "out").exists()


def test_activations_that_are_not_numbers_are_named(folder, tmp_path):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"] *= 1e25  # finite, but not the squares of what it makes
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"layer 1 gate_up: expert 2, row \d+ of calibration sequence 0: "):
        convert(folder, tmp_path / "out", report=silent, **SMALL)


# ---- text ----


def test_sequences_do_not_overlap_and_keep_their_begin():
    tokens = np.arange(100, dtype=np.int32)
    sequences = choose_sequences([777], tokens, samples=9, sequence_length=11, seed=3)
    assert sequences.shape == (9, 11)
    assert (sequences[:, 0] == 777).all()
    assert (np.diff(sequences[:, 1:]) == 1).all()
    assert len(np.unique(sequences[:, 1:])) == 90
    np.testing.assert_array_equal(choose_sequences([777], tokens, 9, 11, 3), sequences)
    assert not np.array_equal(choose_sequences([777], tokens, 9, 11, 4), sequences)


def test_a_tokenizer_that_begins_texts_begins_every_sequence(folder):
    text = "to be or not to be"
    begin, tokens = tokenize(folder, text, 128)
    assert begin == []
    assert tokens.tolist() == [ord(letter) - 31 for letter in text]
    fields = json.loads((folder / "tokenizer.json").read_text())
    fields["added_tokens"] = [
        {"id": 96, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
    ]  # fmt: skip
    begin_token = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    fields["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin_token, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin_token, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [96], "tokens": ["<s>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    edit_json(folder / "tokenizer_config.json", bos_token="<s>")
    begin, again = tokenize(folder, text, 128)
    assert begin == [96]
    np.testing.assert_array_equal(again, tokens)


def test_an_opened_conversion_is_the_one_returned(converted):
    assert open_checkpoint(converted.path) == converted
