# SPDX-License-Identifier: Apache-2.0
"""The trainer's parts: the forward pass against transformers, the schedule, the data order, the state."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from demo_data import read_documents, tokenize_corpus, window_starts
from demo_export import export_hub_folder, hub_tensors, read_hub_folder
from demo_model import DemoConfig, forward, init_params, num_parameters, route, routing_losses
from demo_state import TrainState, load_state, save_state
from evaluate_demo import wikitext_lines_joined
from train_demo import balance_coefficient, learning_rate, loss_fn, make_optimizer
from transformers import AutoModelForCausalLM

TINY = DemoConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=16,
)


@pytest.fixture(scope="module")
def params():
    leaves, structure = jax.tree.flatten(init_params(jax.random.key(0), TINY))
    noise = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, noise, strict=True)]
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), jax.tree.unflatten(structure, noisy))


def test_the_exported_folder_computes_the_same_logits(tmp_path, params):
    export_hub_folder(params, TINY, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 33))
    hidden, _ = forward(params, ids, TINY, dtype=jnp.float32)
    ours = np.asarray(hidden @ params["embed"].T, np.float64)
    with torch.no_grad():
        theirs = model(torch.tensor(ids)).logits.double().numpy()
    assert np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) < 1e-5
    assert num_parameters(params) == sum(p.numel() for p in model.parameters())


def test_the_router_keeps_the_top_k_and_does_not_renormalise(params):
    x = jax.random.normal(jax.random.key(3), (17, TINY.hidden_size))
    weights, probs, _ = route(params["layers"][0], x, 2)
    assert np.array_equal((weights > 0).sum(axis=1), np.full(17, 2))
    kept = np.sort(np.asarray(probs), axis=1)[:, -2:].sum(axis=1)
    np.testing.assert_allclose(weights.sum(axis=1), kept, rtol=1e-6)
    assert np.all(kept < 1)


def test_the_balance_loss_is_one_when_even_and_more_when_not():
    even = (jnp.full((8, 4), 0.25).at[:4, 2:].set(0).at[4:, :2].set(0), jnp.full((8, 4), 0.25), jnp.zeros((8, 4)))
    np.testing.assert_allclose(routing_losses([even], TINY)[0], 1.0, rtol=1e-6)
    probs = jnp.tile(jnp.array([0.7, 0.2, 0.05, 0.05]), (8, 1))
    skewed = (jnp.where(probs > 0.1, probs, 0), probs, jnp.zeros((8, 4)))
    balance, _, least = routing_losses([skewed], TINY)
    assert balance > 1.5
    assert least == 0


def test_unweighted_positions_do_not_move_the_loss(params):
    ids = jnp.asarray(np.random.default_rng(2).integers(0, TINY.vocab_size, (1, 17)))
    weights = jnp.ones((1, 17)).at[0, -1].set(0)
    loss = jax.jit(lambda last, w: loss_fn(params, ids.at[0, -1].set(last), w, 0.0, TINY, "xla")[0])
    np.testing.assert_allclose(loss(3, weights), loss(4, weights), rtol=1e-6)
    assert abs(loss(3, jnp.ones((1, 17))) - loss(4, jnp.ones((1, 17)))) > 1e-3


def test_the_learning_rate_warms_up_holds_and_ends_at_zero():
    rates = [learning_rate(step, 5000, 1.0) for step in range(5001)]
    assert rates[0] == pytest.approx(1 / 300)
    assert rates[299] == rates[1500] == 1.0
    assert rates[5000] == 0.0
    assert np.all(np.diff(rates[299:]) <= 0)


def test_the_balance_coefficient_falls_tenfold():
    assert balance_coefficient(0) == pytest.approx(1e-2)
    assert balance_coefficient(10_000) == pytest.approx(1e-3)


def test_each_epoch_visits_every_window_once_in_a_new_order():
    tokens, length = 50 * 64 + 70, 64
    per_epoch = (tokens - length) // length - 1
    starts = np.concatenate([window_starts(step, 7, length, tokens, seed=0) for step in range(2 * per_epoch)])
    first, second = starts[:per_epoch], starts[per_epoch : 2 * per_epoch]
    for epoch in (first, second):
        assert len(set(epoch.tolist())) == per_epoch
        assert np.all(np.diff(np.sort(epoch)) == length)
        assert epoch.max() + length + 1 <= tokens
    assert not np.array_equal(first, second)


def test_a_saved_state_comes_back_whole(tmp_path, params):
    state = TrainState(params, make_optimizer().init(params), step=12, total_steps=99, seconds=1.5)
    save_state(tmp_path / "state.npz", state)
    blank = TrainState(jax.tree.map(jnp.zeros_like, params), make_optimizer().init(params))
    loaded = load_state(tmp_path / "state.npz", blank)
    assert (loaded.step, loaded.total_steps, loaded.seconds) == (12, 99, 1.5)
    saved, back = (jax.tree.leaves((s.params, s.opt_state)) for s in (state, loaded))
    assert all(np.array_equal(a, b) for a, b in zip(saved, back, strict=True))


def test_exported_names_hold_the_right_matrices(params):
    tensors = hub_tensors(params)
    expert = np.asarray(params["layers"][1]["expert_up"][2])
    assert np.array_equal(tensors["model.layers.1.mlp.experts.2.up_proj.weight"].astype(np.float32), expert)
    assert "lm_head.weight" not in tensors


def test_an_exported_folder_is_read_back_whole(tmp_path, params):
    export_hub_folder(params, TINY, tmp_path)
    read = read_hub_folder(tmp_path, TINY)
    assert jax.tree.structure(read) == jax.tree.structure(params)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(read), jax.tree.leaves(params), strict=True))


def test_every_hundredth_document_is_kept_for_validation(tmp_path, demo_tokenizer):
    documents = [f"Document number {i}." for i in range(201)]
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(documents))
    assert read_documents(tmp_path) == documents
    train, valid, valid_bytes = tokenize_corpus(tmp_path, demo_tokenizer, tmp_path / "cache")
    held = [documents[i] for i in (0, 100, 200)]
    assert valid_bytes == sum(map(len, held))
    assert demo_tokenizer.decode(valid.tolist(), skip_special_tokens=True) == "".join(held)
    assert (np.asarray(train) == 0).sum() == 198


def test_wikitext_rows_are_joined_as_the_papers_do():
    assert wikitext_lines_joined(" \n = A = \n \n text \n") == "\n\n = A = \n\n\n\n\n text \n"


def test_the_training_record_fits_the_weights(demo_folder):
    record = json.loads((demo_folder / "training" / "results.json").read_text())["training"]
    assert record["safetensors_bytes"] == (demo_folder / "model.safetensors").stat().st_size
    assert record["tokens"] == record["steps"] * 64 * 2048
