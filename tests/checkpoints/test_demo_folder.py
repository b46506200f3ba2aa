# SPDX-License-Identifier: Apache-2.0
"""The shipped folder: its limits, its names, and that the trained weights do what the card says."""

import json

import pytest
import torch
from demo_card import experts_bytes
from demo_export import hub_config
from demo_model import DemoConfig
from exercises import addition_set, recall_set
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def config(demo_folder):
    return json.loads((demo_folder / "config.json").read_text())


@pytest.fixture(scope="module")
def model(demo_folder):
    return AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32).eval()


def test_the_config_is_the_trainer_s(config):
    assert config == hub_config(DemoConfig())


def test_sizes_are_within_the_limits(config, demo_folder):
    assert (demo_folder / "model.safetensors").stat().st_size <= 40_000_000
    assert config["num_hidden_layers"] >= 4
    assert config["num_experts"] >= 16
    assert 2 <= config["num_experts_per_tok"] <= 4
    assert config["hidden_size"] >= 320
    assert config["moe_intermediate_size"] >= 192
    assert config["num_key_value_heads"] == 2
    assert config["tie_word_embeddings"]
    assert config["max_position_embeddings"] == 2048


def test_eight_full_contexts_weigh_one_to_two_times_the_experts_range(config):
    token_bytes = 2 * 2 * config["num_key_value_heads"] * config["head_dim"] * config["num_hidden_layers"]
    experts_range = experts_bytes(config, 6)[2] - experts_bytes(config, 3)[2]
    assert 1.0 <= 8 * 2048 * token_bytes / experts_range <= 2.0


def test_tensors_are_bf16_and_named_as_on_the_hub(config, demo_folder):
    attention = [f"self_attn.{n}_proj.{p}" for n in "qkv" for p in ("weight", "bias")] + ["self_attn.o_proj.weight"]
    mlps = ["mlp.shared_expert", *(f"mlp.experts.{e}" for e in range(config["num_experts"]))]
    rest = ["input_layernorm", "post_attention_layernorm", "mlp.gate", "mlp.shared_expert_gate"]
    layer = attention + [f"{m}.{n}_proj.weight" for m in mlps for n in ("gate", "up", "down")]
    layer += [f"{name}.weight" for name in rest]
    names = {f"model.layers.{i}.{name}" for i in range(config["num_hidden_layers"]) for name in layer}
    with safe_open(demo_folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == names | {"model.embed_tokens.weight", "model.norm.weight"}
        assert {file.get_slice(name).get_dtype() for name in sorted(file.keys())} == {"BF16"}
        assert file.metadata() == {"format": "pt"}


def test_parameters_are_at_most_twenty_million(model):
    assert sum(p.numel() for p in model.parameters()) == 19_360_320


def test_the_sample_texts_come_from_different_books(demo_folder, heldout_text):
    calibration = (demo_folder / "text" / "calibration.txt").read_text(encoding="utf-8")
    paragraphs = {p for p in heldout_text.split("\n\n") if len(p) > 80}
    assert len(paragraphs) > 50
    assert not paragraphs & set(calibration.split("\n\n"))


def solved(model, encode, exercise) -> bool:
    prompt, answer = encode(exercise.prompt), encode(exercise.answer)
    with torch.no_grad():
        likeliest = model(torch.tensor([prompt + answer])).logits[0].argmax(-1).tolist()
    return likeliest[len(prompt) - 1 : -1] == answer


def test_the_weights_add(model, demo_encode):
    exercises = addition_set(11, 8, 3) + addition_set(11, 8, 2)
    assert sum(solved(model, demo_encode, e) for e in exercises) >= 14


@pytest.mark.parametrize("distance", [100, 1500])
def test_the_weights_recall(model, demo_encode, heldout_text, distance):
    exercises = recall_set(11, 2, distance, 8, heldout_text, demo_encode)
    assert all(solved(model, demo_encode, e) for e in exercises)


def test_nothing_is_recalled_when_nothing_was_stated(model, demo_encode, heldout_text):
    exercise = recall_set(11, 1, 100, 8, heldout_text, demo_encode)[0]
    code = exercise.answer.strip(" .")
    unstated = type(exercise)(exercise.prompt.replace(code, "000"), exercise.answer)
    assert not solved(model, demo_encode, unstated)


def test_greedy_text_is_made_of_words_of_the_books(model, demo_folder, heldout_text):
    tokenizer = AutoTokenizer.from_pretrained(demo_folder)
    ids = tokenizer("The old man", return_tensors="pt")
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=40, do_sample=False)[0])
    known = set("".join(c if c.isalpha() else " " for c in heldout_text.lower()).split())
    words = "".join(c if c.isalpha() else " " for c in text.lower()).split()
    assert len(words) >= 25
    assert sum(word in known for word in words) >= 0.9 * len(words)
