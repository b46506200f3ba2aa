# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is held to its source: other weights, pages or sensitivities are found and named."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pagedweight_jax.calibrate.compare import TOLERANCE, compare_with_source
from pagedweight_jax.calibrate.convert import convert
from pagedweight_jax.checkpoint.paged import PagedCheckpoint
from pagedweight_jax.config import DOWN
from pagedweight_jax.errors import UserError


@pytest.fixture(scope="module")
def folder(save_hf, save_tokenizer, tmp_path_factory):
    """Its sparse layer 0 is its layer 1; bfloat16."""
    folder = tmp_path_factory.mktemp("hf") / "tiny"
    save_hf(folder, dtype="bfloat16", mlp_only_layers=[0])
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def converted(folder, hf_folder, tmp_path_factory):
    out, text = tmp_path_factory.mktemp("paged") / "tiny", hf_folder / "text" / "calibration.txt"
    return convert(folder, out, bits=(2, 3), samples=4, sequence_length=32, text=text, report=lambda line: None)


def test_the_source_fits(folder, converted):
    comparison = compare_with_source(converted, folder)
    assert comparison.problems == []
    assert comparison.blocks == 8
    assert comparison.worst <= TOLERANCE


@pytest.mark.parametrize(
    ("tensor", "problems"),
    [
        (
            "model.layers.1.mlp.experts.2.down_proj.weight",
            ["layer 1 down: expert 2 at 2 bits", "layer 1 down: expert 2 at 3 bits"],
        ),
        ("model.layers.0.mlp.up_proj.weight", ["array dense/layers.0.mlp.up_DF differs"]),
        ("model.embed_tokens.weight", ["array dense/embed_VD differs"]),
    ],
)
def test_another_weight_is_found(folder, converted, tmp_path, tensor, problems):
    other = shutil.copytree(folder, tmp_path / "hf")
    tensors = load_file(other / "model.safetensors")
    tensors[tensor] = tensors[tensor].copy()
    tensors[tensor][3, 5] += 1
    save_file(tensors, other / "model.safetensors")
    found = compare_with_source(converted, other).problems
    assert len(found) == len(problems)
    for line, problem in zip(found, problems):
        assert line.startswith(problem)


def test_another_page_is_found(folder, converted, monkeypatch):
    """A page that passed its checksum, as if the quantizer had been wrong."""
    load_pages = PagedCheckpoint.load_pages

    def swapped(self, layer, kind, page):
        pages = load_pages(self, layer, kind, page).copy()
        if (kind, page) == (DOWN, 1):
            pages[[0, 1]] = pages[[1, 0]]
        return pages

    monkeypatch.setattr(PagedCheckpoint, "load_pages", swapped)
    found = compare_with_source(converted, folder).problems
    assert {line.split(" differs")[0] for line in found} == {
        f"layer 1 down: expert {e} at {bits} bits" for e in (0, 1) for bits in (2, 3)
    }


def test_another_model_is_refused(folder, converted, tmp_path):
    other = shutil.copytree(folder, tmp_path / "hf")
    fields = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(fields | {"rms_norm_eps": 1e-5}))
    with pytest.raises(UserError, match="another model, rms_norm_eps is 1e-05, the checkpoint's 1e-06"):
        compare_with_source(converted, other)


def test_sensitivities_are_not_compared_with_themselves(folder, converted, monkeypatch):
    s_LEUQ = converted.sensitivity * (1 + 3 * TOLERANCE)
    monkeypatch.setattr(PagedCheckpoint, "sensitivity", property(lambda self: s_LEUQ))
    assert len(compare_with_source(converted, folder).problems) == np.size(s_LEUQ)
