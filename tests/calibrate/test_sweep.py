# SPDX-License-Identifier: Apache-2.0
"""A conversion with Fisher rows: they weight the sensitivities and nothing else, are recorded, and can be resumed."""

import numpy as np
import pytest

from pagedweight_jax.calibrate import sweep as sweeps
from pagedweight_jax.calibrate.any_precision import quantize
from pagedweight_jax.calibrate.compare import compare_with_source
from pagedweight_jax.calibrate.convert import convert
from pagedweight_jax.calibrate.fisher import layer_gradient, layer_output, row_weights, top_gradient
from pagedweight_jax.calibrate.prepare import costs, prepare
from pagedweight_jax.calibrate.sensitivity import sensitivity
from pagedweight_jax.calibrate.sequences import read_blocks
from pagedweight_jax.checkpoint.draft import ARRAY_BYTES
from pagedweight_jax.checkpoint.hf import load_config, load_weights
from pagedweight_jax.checkpoint.paged import open_checkpoint, verify
from pagedweight_jax.checkpoint.summary import summarize
from pagedweight_jax.config import DOWN, GATE_UP, KINDS
from pagedweight_jax.errors import UserError
from pallas_kernels.bitplane import dequantize_pages

SMALL = {"bits": (2, 3), "samples": 6, "sequence_length": 32, "report": lambda line: None}


@pytest.fixture(scope="module")
def folder(save_hf, save_tokenizer, tmp_path_factory):
    """Sparse layers 1 and 2 behind a dense one; bfloat16."""
    folder = tmp_path_factory.mktemp("hf") / "tiny"
    save_hf(folder, dtype="bfloat16", mlp_only_layers=[0], num_hidden_layers=3)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def options(hf_folder):
    return SMALL | {"text": hf_folder / "text" / "calibration.txt"}


@pytest.fixture(scope="module")
def plain(folder, options, tmp_path_factory):
    return convert(folder, tmp_path_factory.mktemp("plain") / "out", **options)


@pytest.fixture(scope="module")
def converted(folder, options, tmp_path_factory):
    return convert(folder, tmp_path_factory.mktemp("fisher") / "out", importance="fisher", **options)


def test_the_choice_is_recorded_and_moves_nothing_but_sensitivities(plain, converted):
    assert plain.manifest.calibration.importance == "inputs"
    assert plain.fisher(DOWN) is None
    assert summarize(converted)["calibration"]["importance"] == "fisher"
    mine, theirs = converted.manifest.arrays, plain.manifest.arrays
    more = {"calibration/fisher/gate_up", "calibration/fisher/down"}
    assert mine.keys() - theirs.keys() == more
    assert {name for name in theirs if mine[name] != theirs[name]} == {"calibration/sensitivity"}
    assert verify(converted.path) == []


def test_rows_are_mean_squared_gradients_and_weight_the_errors(folder, converted, options):
    config = load_config(folder)
    weights = load_weights(folder, config, None, lambda line: None)
    sequences_NS = prepare(folder, converted.path.parent / "again", **options).sequences_NS
    rows_LU = [[0, 0] for _ in range(3)]
    for batch in (sequences_NS[:4], sequences_NS[4:]):
        hidden = [weights.embed_VD[batch]]
        for layer, w in enumerate(weights.layers):
            hidden.append(layer_output(config, layer, w, hidden[-1]))
        gradient_BSD = np.stack([top_gradient(weights, *pair) for pair in zip(hidden[-1], batch)])
        for layer in (2, 1):
            gradient_BSD, squares = layer_gradient(config, layer, weights.layers[layer], hidden[layer], gradient_BSD)
            rows_LU[layer] = [sum_EN + np.asarray(more_EN) for sum_EN, more_EN in zip(rows_LU[layer], squares)]
    for kind in (GATE_UP, DOWN):
        for sparse_layer, layer in enumerate((1, 2)):
            fisher_EN = converted.fisher(kind)[sparse_layer]
            np.testing.assert_allclose(fisher_EN, rows_LU[layer][kind] / sequences_NS.size, rtol=1e-5)
            experts = weights.layers[layer].mlp.experts
            w_ENC = np.asarray((experts.gate_up_ENC, experts.down_ENC)[kind], np.float32)
            h_EC, f_EN = converted.importance(kind)[sparse_layer], row_weights(fisher_EN, np.zeros(4, bool))
            expected_EQ = sensitivity(w_ENC, quantize(w_ENC, h_EC, 2, 3), h_EC, 2, 3, f_EN)
            np.testing.assert_allclose(converted.sensitivity[sparse_layer, :, kind], expected_EQ, rtol=1e-12)
    assert not converted.uncalibrated.any()


@pytest.mark.parametrize("kind", [GATE_UP, DOWN])
def test_the_damage_of_sequences_is_weighted_alike(plain, converted, kind):
    high_ENC, delta_ECR = read_blocks(converted, 1, kind)
    plain_ENC, plain_ECR = read_blocks(plain, 1, kind)
    np.testing.assert_array_equal(high_ENC, plain_ENC)
    layout = converted.manifest.layouts()[kind]
    f_EN = row_weights(converted.fisher(kind)[1], converted.uncalibrated[1])
    pages = [converted.load_pages(1, kind, page) for page in range(2)]
    for e in range(4):
        low_NC = np.asarray(dequantize_pages([page[e] for page in pages], layout))
        square_NC = np.square(high_ENC[e] - low_NC, dtype=np.float64)
        np.testing.assert_allclose(delta_ECR[e, :, 0], f_EN[e] @ square_NC, rtol=1e-5)
        np.testing.assert_allclose(plain_ECR[e, :, 0], square_NC.sum(0), rtol=1e-5)


def test_the_source_fits(folder, converted):
    comparison = compare_with_source(converted, folder)
    assert comparison.problems == []


@pytest.mark.parametrize("steps", range(1, 8, 2))
def test_a_sweep_that_is_cut_short_goes_on(folder, options, converted, tmp_path, monkeypatch, steps):
    """Its steps: three layers forward, the top, two layers backward; then the conversion's own."""
    commit, done, out = sweeps.Draft.commit, [], tmp_path / "out"

    def dying(draft, step, groups, remember):
        if len(done) > steps:
            raise KeyboardInterrupt
        done.append(step)
        commit(draft, step, groups, remember)

    with monkeypatch.context() as patch:
        patch.setattr(sweeps.Draft, "commit", dying)
        with pytest.raises(KeyboardInterrupt):
            convert(folder, out, importance="fisher", **options)
    again = []

    def counting(draft, step, *arguments):
        again.append(step)
        commit(draft, step, *arguments)

    monkeypatch.setattr(sweeps.Draft, "commit", counting)
    convert(folder, out, importance="fisher", **options)
    assert not set(again) & set(done)
    assert (out / "manifest.json").read_bytes() == (converted.path / "manifest.json").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_another_importance_is_another_conversion(folder, options, plain, tmp_path):
    with pytest.raises(UserError, match="importance 'hessian': one of inputs, fisher"):
        prepare(folder, tmp_path / "out", importance="hessian", **options)
    dear = costs(prepare(folder, tmp_path / "out", importance="fisher", **options))
    cheap = costs(prepare(folder, tmp_path / "out", **options))
    assert dear.read_bytes == 3 * cheap.read_bytes
    assert dear.disk_bytes - cheap.disk_bytes == 3 * cheap.hidden_bytes + len(KINDS) * ARRAY_BYTES
    assert open_checkpoint(plain.path).manifest.calibration.importance == "inputs"


def test_progress_counts_the_sweep_to_its_end(folder, options, tmp_path):
    seen = []
    convert(folder, tmp_path / "out", importance="fisher", progress=lambda *step: seen.append(step), **options)
    counts = [(done, total) for stage, done, total in seen if stage == "fisher"]
    assert counts == sorted(counts)
    assert {total for _, total in counts} == {(3 + 2) * 6}
    assert counts[-1] == (30, 30)
