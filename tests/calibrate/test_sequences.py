# SPDX-License-Identifier: Apache-2.0
"""What single sequences do to the experts, against the dequantized weights and a plain pass, token by token."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.calibrate.convert import convert
from pagedweight_jax.calibrate.routed import hidden_squares
from pagedweight_jax.calibrate.sequences import measure_sequences, read_layer, usage
from pagedweight_jax.calibrate.text import choose_sequences, read_text, tokenize
from pagedweight_jax.checkpoint.draft import open_draft
from pagedweight_jax.config import DOWN, GATE_UP
from pagedweight_jax.models.attention import dense_attention
from pagedweight_jax.models.layers import activation
from pagedweight_jax.models.transformer import decoder_layer
from pagedweight_jax.planning.damage import global_damage
from pallas_kernels.bitplane import dequantize_pages
from pallas_kernels.routing.reference import top_experts

SAMPLES, S, SPAN = 6, 64, 16
BITS = (2, 4)


@pytest.fixture(scope="module")
def checkpoint(hf_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("paged") / "tiny"
    return convert(hf_folder, out, bits=BITS, samples=SAMPLES, sequence_length=S, report=lambda line: None)


@pytest.fixture(scope="module")
def sequences_NS(checkpoint):
    """The very tokens of the conversion."""
    text = read_text(checkpoint.path / "text" / "calibration.txt")
    begin, tokens = tokenize(checkpoint.path, text, checkpoint.manifest.config.vocab_size)
    return choose_sequences(begin, tokens, SAMPLES, S, 0)


@pytest.fixture(scope="module")
def statistics(checkpoint, sequences_NS, tmp_path_factory):
    with open_draft(tmp_path_factory.mktemp("draft") / "out", {}) as draft:
        return measure_sequences(checkpoint, sequences_NS, SPAN, draft)


def blocks(checkpoint, layer, expert, kind):
    """W^b of one block by bits, float64."""
    manifest = checkpoint.manifest
    pages = [checkpoint.load_pages(layer, kind, page)[expert] for page in range(manifest.max_bits)]
    widths = range(manifest.min_bits, manifest.max_bits + 1)
    return {b: np.asarray(dequantize_pages(pages[:b], manifest.layouts()[kind]), np.float64) for b in widths}


def seen_by_layers(checkpoint, tokens_S):
    """Every layer's (residual behind it, m_SD, ids_SK, weights_SK) of one sequence, each expert run on its own."""
    config = checkpoint.manifest.config
    act = activation(config.hidden_act)
    x_SD = jnp.asarray(checkpoint.load("dense/embed_VD")[tokens_S])
    seen = []

    def attend(_, layer, q, k, v):
        return None, dense_attention(q, k, v, config.head_dim**-0.5, config.windows[layer])

    for layer in range(config.num_layers):
        w, _ = read_layer(checkpoint, layer)

        def experts(_, sparse_layer, m_SD, ids_SK, weights_SK, w=w):
            y_SD = 0
            for e in range(config.num_experts):
                gate_up_NC, down_NC = (blocks(checkpoint, sparse_layer, e, kind)[BITS[1]] for kind in (GATE_UP, DOWN))
                gate_SF, up_SF = jnp.split(m_SD @ gate_up_NC.T, 2, axis=-1)
                r_S1 = jnp.where(ids_SK == e, weights_SK, 0).sum(-1, keepdims=True)
                y_SD = y_SD + r_S1 * ((act(gate_SF) * up_SF) @ down_NC.T)
            return (m_SD, ids_SK, weights_SK), y_SD

        routed, x_SD = decoder_layer(config, layer, w, x_SD, jnp.arange(len(tokens_S)), None, attend, experts)
        seen.append([np.asarray(array, np.float64) for array in (x_SD, *routed)])
    return seen


def definition(checkpoint, layer, expert, seen, span):
    """D of one expert's blocks, and its tokens' relative sizes: token by token in float64."""
    blocks_U = [blocks(checkpoint, layer, expert, kind) for kind in (GATE_UP, DOWN)]
    F = checkpoint.manifest.config.moe_intermediate_size
    down_NC = blocks_U[DOWN][BITS[1]]
    h_U = [np.zeros(blocks_U[kind][BITS[1]].shape[1]) for kind in (GATE_UP, DOWN)]
    mass, sizes = 0.0, []
    for x_D, m_D, ids_K, weights_K in zip(*(array[span] for array in seen)):
        for r in weights_K[ids_K == expert]:
            gate_F, up_F = np.split(blocks_U[GATE_UP][BITS[1]] @ m_D, 2)
            sigmoid_F = 1 / (1 + np.exp(-gate_F))
            slope_F = sigmoid_F * (1 + gate_F * (1 - sigmoid_F))
            h_F = gate_F * sigmoid_F * up_F
            column_F = np.square(down_NC).sum(0)
            v = ((np.square(slope_F * up_F) + np.square(gate_F * sigmoid_F)) * column_F).sum() / (2 * F)
            share = r**2 / (x_D @ x_D)
            h_U[GATE_UP] += share * v * m_D**2
            h_U[DOWN] += share * h_F**2
            mass += r
            sizes.append((share**0.5, share**0.5 * np.linalg.norm(h_F)))
    damage_UR = np.array(
        [
            [h_C @ np.square(block[b] - block[b - 1]).sum(0) for b in range(BITS[1], BITS[0], -1)]
            for h_C, block in zip(h_U, blocks_U)
        ]
    )
    return damage_UR, mass, np.array(sizes).reshape(-1, 2)


def test_one_span_is_the_definition(checkpoint, sequences_NS, statistics):
    n, z = 3, 2
    span = slice(z * SPAN, (z + 1) * SPAN)
    seen_L = seen_by_layers(checkpoint, sequences_NS[n])
    for layer, seen in enumerate(seen_L):
        for e in range(4):
            damage_UR, mass, size_U = definition(checkpoint, layer, e, seen, span)
            np.testing.assert_allclose(statistics.damage_NZLEUR[n, z, layer, e] * SPAN, damage_UR, rtol=2e-4)
            np.testing.assert_allclose(statistics.mass_NZLE[n, z, layer, e] * SPAN, mass, rtol=1e-5)
            assert statistics.tokens_NZLE[n, z, layer, e] == len(size_U)
            if len(size_U):
                np.testing.assert_allclose(statistics.norm_NZLEU[n, z, layer, e] * SPAN, size_U.sum(0), rtol=1e-4)
                np.testing.assert_allclose(
                    statistics.square_NZLEU[n, z, layer, e] * SPAN, np.square(size_U).sum(0), rtol=1e-4
                )
                np.testing.assert_allclose(statistics.max_NZLEU[n, z, layer, e], size_U.max(0), rtol=1e-4)


def test_the_sequences_add_up_to_the_global_damage(checkpoint, statistics):
    """Up to the float16 of the centroids; the forward pass at 4 bits drifts from the source's, layer by layer."""
    mean_LEUR = statistics.damage_NZLEUR.astype(np.float64).mean((0, 1))
    g_LEUR = global_damage(checkpoint.sensitivity)
    np.testing.assert_allclose(mean_LEUR[0], g_LEUR[0], rtol=0.02)
    np.testing.assert_allclose(mean_LEUR[1], g_LEUR[1], rtol=0.1)
    assert np.abs(np.log(mean_LEUR[:, ::-1] / g_LEUR)).mean() > 0.1  # other experts' damage is not near


def test_the_importance_of_the_text_gives_its_global_damage(checkpoint):
    """The weighted square of W^b - W^(b-1) is the rise of the weighted error, but for the centroids' float16."""
    g_LEUR = global_damage(checkpoint.sensitivity)
    for layer in range(2):
        _, delta_UECR = read_layer(checkpoint, layer)
        for kind in (GATE_UP, DOWN):
            h_EC = checkpoint.importance(kind)[layer].astype(np.float64)
            rise_ER, other_ER = (np.einsum("EC,ECR->ER", h, delta_UECR[kind]) for h in (h_EC, h_EC[::-1]))
            np.testing.assert_allclose(rise_ER, g_LEUR[layer, :, kind], rtol=1e-3)
            assert not np.allclose(other_ER, g_LEUR[layer, :, kind], rtol=1e-2, atol=0)


def test_spans_do_not_change_the_sequence(checkpoint, sequences_NS, statistics, tmp_path):
    with open_draft(tmp_path / "out", {}) as draft:
        whole = measure_sequences(checkpoint, sequences_NS, S, draft)
    for name in ("damage_NZLEUR", "mass_NZLE", "norm_NZLEU", "square_NZLEU"):
        mean = getattr(statistics, name).mean(1, keepdims=True)
        np.testing.assert_allclose(mean, getattr(whole, name), rtol=1e-4, atol=1e-12)
    np.testing.assert_allclose(statistics.max_NZLEU.max(1, keepdims=True), whole.max_NZLEU, rtol=1e-6)


def test_a_finished_layer_is_not_run_again(checkpoint, sequences_NS, statistics, tmp_path, monkeypatch):
    def dying(stage, done, total):
        if done == SAMPLES + 2:  # in layer 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), open_draft(tmp_path / "out", {}) as draft:
        measure_sequences(checkpoint, sequences_NS, SPAN, draft, dying)
    read = []
    monkeypatch.setattr(
        "pagedweight_jax.calibrate.sequences.read_layer", lambda c, layer: read.append(layer) or read_layer(c, layer)
    )
    with open_draft(tmp_path / "out", {}, report=lambda line: None) as draft:
        again = measure_sequences(checkpoint, sequences_NS, SPAN, draft)
    assert read == [1]
    for field in dataclasses.fields(again):
        np.testing.assert_array_equal(getattr(again, field.name), getattr(statistics, field.name))


def test_hidden_squares_belong_to_their_token_and_expert(tiny_config, tiny_weights):
    config = tiny_config()
    w = tiny_weights.layers[0].mlp
    m_TD = jax.random.normal(jax.random.key(1), (70, config.hidden_size))
    _, ids_TK = top_experts(m_TD, w.router_DE, 2, False)
    square_TK = hidden_squares(m_TD, ids_TK, w.experts, jax.nn.silu)
    gate_TKF, up_TKF = jnp.split(jnp.einsum("TD,TKND->TKN", m_TD, w.experts.gate_up_ENC[ids_TK]), 2, axis=-1)
    expected_TK = np.square(jax.nn.silu(gate_TKF) * up_TKF).sum(-1)
    np.testing.assert_allclose(square_TK, expected_TK, rtol=1e-5)


def test_usage_is_added_up_in_one_order():
    """No scatter, whose order of additions is not defined on a GPU; by the loop that it stands for."""
    rng = np.random.default_rng(2)
    ids_TK, r_TK = rng.integers(0, 5, (30, 2)), rng.random((30, 2), np.float32)
    size_TKU = rng.random((30, 2, 2), np.float32)
    found = usage(ids_TK, r_TK, size_TKU, 6)
    expected = {"mass": np.zeros(6), **{name: np.zeros((6, 2)) for name in ("norm", "square", "max")}}
    for (t, k), e in np.ndenumerate(ids_TK):
        expected["mass"][e] += r_TK[t, k] / 30
        expected["norm"][e] += size_TKU[t, k] / 30
        expected["square"][e] += size_TKU[t, k] ** 2 / 30
        expected["max"][e] = np.maximum(expected["max"][e], size_TKU[t, k])
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, err_msg=name)

    def operations(function):
        return str(jax.make_jaxpr(function, static_argnums=3)(ids_TK, r_TK, size_TKU, 6))

    assert "scatter" not in operations(usage)
    assert "scatter" in operations(lambda ids_TK, r_TK, size_TKU, E: jnp.zeros(E).at[ids_TK].add(r_TK))


def test_a_model_with_a_dense_layer(save_hf, save_tokenizer, hf_folder, tmp_path):
    folder = tmp_path / "hf"
    save_hf(folder, dtype="bfloat16", mlp_only_layers=[0])
    save_tokenizer(folder)
    text = Path(hf_folder) / "text" / "calibration.txt"
    paged = convert(folder, tmp_path / "out", bits=(2, 2), samples=2, sequence_length=32, text=text, report=print)
    tokens_NS = np.arange(64, dtype=np.int32).reshape(2, 32)
    with open_draft(tmp_path / "draft", {}) as draft:
        statistics = measure_sequences(paged, tokens_NS, 32, draft)
    assert statistics.damage_NZLEUR.shape == (2, 1, 1, 4, 2, 0)  # one bitwidth: nothing to lower
    np.testing.assert_allclose(statistics.tokens_NZLE.sum(-1), 64)
