# SPDX-License-Identifier: Apache-2.0
import jax
import pytest

from pagedweight_jax.errors import UserError
from pagedweight_jax.models.families import QWEN2_MOE, config_from_hf, eos_token_ids
from pagedweight_jax.models.weights import init_weights

TRANSFORMERS_4 = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "bos_token_id": 5,
    "eos_token_id": 6,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "moe_intermediate_size": 32,
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 48,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 128,
}


def parse(**changes):
    return config_from_hf({k: v for k, v in (TRANSFORMERS_4 | changes).items() if v != "absent"})


def test_the_form_of_transformers_4():
    config = parse()
    assert (config.rope_theta, config.head_dim, config.eos_token_ids, config.qkv_bias) == (1e6, 16, (6,), True)
    assert config.sparse_layers == (True,) * 4
    assert config.windows == (0,) * 4
    assert hash(config) == hash(parse())


def test_the_form_of_transformers_5_gives_the_same():
    rope = {"rope_type": "default", "rope_theta": 1e6}
    window = {"sliding_window": 0, "layer_types": ["full_attention"] * 4}
    assert parse(rope_theta="absent", rope_parameters=rope, head_dim=None, mlp_only_layers=[], **window) == parse()


def test_agrees_with_the_class_of_transformers():
    from transformers import Qwen2MoeConfig

    changes = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3, "num_hidden_layers": 5}
    for extra in ({}, {"rope_theta": 123.0}, {"rope_theta": "absent"}, {"rope_parameters": {"rope_theta": 5.0}}):
        fields = {k: v for k, v in (TRANSFORMERS_4 | changes | extra).items() if v != "absent"}
        theirs, ours = Qwen2MoeConfig(**fields), parse(**changes, **extra)
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
        assert ours.windows == tuple(7 if t == "sliding_attention" else 0 for t in theirs.layer_types)
        assert ours == config_from_hf(theirs.to_dict())
    assert ours.windows == (7, 0, 7, 0, 0)


def test_optional_fields():
    assert parse(head_dim=24).head_dim == 24
    assert parse(mlp_only_layers=[0, 3], decoder_sparse_step=2).sparse_layers == (False, True, False, False)
    assert parse(use_sliding_window=True, sliding_window=9, layer_types=["sliding_attention"] * 4).windows == (9,) * 4
    assert parse(sliding_window=9, layer_types=["sliding_attention"] * 4).windows == (0,) * 4
    assert parse(num_key_value_heads=None).num_kv_heads == 4
    assert parse(eos_token_id=[3, 7]).eos_token_ids == (3, 7)
    assert parse(eos_token_id=None).eos_token_ids == parse(eos_token_id="absent").eos_token_ids == ()
    assert eos_token_ids({"eos_token_id": 0}) == (0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported; supported: qwen2_moe"),
        ({"model_type": "absent"}, "model_type None is not supported"),
        ({"hidden_size": "absent"}, "field 'hidden_size' is missing"),
        ({"hidden_size": "64"}, "field 'hidden_size' must be a positive integer, got '64'"),
        ({"num_experts": True}, "field 'num_experts' must be a positive integer, got True"),
        ({"vocab_size": 0}, "field 'vocab_size' must be a positive integer, got 0"),
        ({"num_hidden_layers": 10**12}, "field 'num_hidden_layers' is 1000000000000, more than 1000 are taken for"),
        ({"decoder_sparse_step": 0}, "field 'decoder_sparse_step' must be a positive integer, got 0"),
        ({"rms_norm_eps": -1e-6}, "field 'rms_norm_eps' must be a positive number, got -1e-06"),
        ({"rope_theta": float("nan")}, "field 'rope_theta' must be a positive number, got nan"),
        ({"qkv_bias": 1}, "field 'qkv_bias' must be of type bool, got 1"),
        ({"rope_parameters": [1]}, "field 'rope_parameters' must be of type dict"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rotary embeddings must be plain and whole, got type 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rotated part 0.5"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds num_experts 8"),
        ({"num_key_value_heads": 3}, "4 attention heads do not divide among 3 key-value heads"),
        ({"hidden_size": 65}, "hidden_size 65 is not a multiple of 4 attention heads"),
        ({"head_dim": 15}, "even head_dim, got 15"),
        ({"mlp_only_layers": [-1]}, "field 'mlp_only_layers' must be a list of integers from 0"),
        ({"eos_token_id": "</s>"}, "field 'eos_token_id' must be a list of integers from 0, got '</s>'"),
        ({"use_sliding_window": True, "sliding_window": None}, "field 'sliding_window' is missing"),
        ({"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types must name 4 layers"),
        ({"use_sliding_window": True, "layer_types": ["chunked"] * 4}, "layer_types must name 4 layers"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is set"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(changes, message):
    with pytest.raises(UserError) as error:
        parse(**changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("changes", [{}, {"mlp_only_layers": [1], "tie_word_embeddings": True, "qkv_bias": False}])
def test_the_table_names_every_array(changes):
    config = parse(**changes)
    shapes = jax.eval_shape(lambda key: init_weights(config, key), jax.random.key(0))
    leaves, _ = jax.tree_util.tree_flatten_with_path(shapes)
    keys = set()
    for path, _ in leaves:
        names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        keys.add(".".join(name for name in names if not name.isdigit()))
    assert keys <= QWEN2_MOE.tensors.keys()
    if not changes:
        assert QWEN2_MOE.tensors.keys() - keys == {f"layers.mlp.{n}" for n in ("gate_DF", "up_DF", "down_FD")}
