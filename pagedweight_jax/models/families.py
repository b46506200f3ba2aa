# SPDX-License-Identifier: Apache-2.0
"""What differs between Hugging Face model families: the fields of config.json and the names of tensors."""

from dataclasses import dataclass
from typing import Any, Literal

from pagedweight_jax.config import ModelConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.models.layers import activation

_REQUIRED = object()


@dataclass(frozen=True)
class TensorSource:
    """Where an array of ``Weights`` comes from.

    Attributes:
      names: tensor names; ``{layer}`` and ``{expert}`` are filled in.
      form: ``same``; ``transposed`` ([out, in] in the file); ``row`` (one row, [1, D] in the file);
        ``per_expert`` (expert e is the rows of all ``names`` for e, one below the other).
      fused: a tensor that holds all experts as the array does, which some folders have in the place of ``names``.
    """

    names: tuple[str, ...]
    form: Literal["same", "transposed", "row", "per_expert"]
    fused: str | None = None


@dataclass(frozen=True)
class Family:
    """One model_type: its tensors by dotted path in ``Weights`` (layer number left out), and what may be ignored.

    Attributes:
      tensors: the source of every array.
      skipped: regular expressions of tensor names that a checkpoint may hold and the model does not need, each with
        the reason.
    """

    tensors: dict[str, TensorSource]
    skipped: dict[str, str]


def _same(name: str) -> TensorSource:
    return TensorSource((name,), "same")


def _linear(name: str) -> TensorSource:
    return TensorSource((name,), "transposed")


def _gated(ours: str, theirs: str) -> dict[str, TensorSource]:
    return {
        f"{ours}.gate_DF": _linear(f"{theirs}.gate_proj.weight"),
        f"{ours}.up_DF": _linear(f"{theirs}.up_proj.weight"),
        f"{ours}.down_FD": _linear(f"{theirs}.down_proj.weight"),
    }


_LAYER = "model.layers.{layer}"
_EXPERT = _LAYER + ".mlp.experts.{expert}"

QWEN2_MOE = Family(
    tensors={
        "embed_VD": _same("model.embed_tokens.weight"),
        "norm_D": _same("model.norm.weight"),
        "lm_head_DV": _linear("lm_head.weight"),
        "layers.input_norm_D": _same(f"{_LAYER}.input_layernorm.weight"),
        "layers.post_attention_norm_D": _same(f"{_LAYER}.post_attention_layernorm.weight"),
        **{f"layers.attention.{n}_DN": _linear(f"{_LAYER}.self_attn.{n}_proj.weight") for n in "qkv"},
        **{f"layers.attention.{n}_bias_N": _same(f"{_LAYER}.self_attn.{n}_proj.bias") for n in "qkv"},
        "layers.attention.o_ND": _linear(f"{_LAYER}.self_attn.o_proj.weight"),
        **_gated("layers.mlp", f"{_LAYER}.mlp"),
        "layers.mlp.router_DE": _linear(f"{_LAYER}.mlp.gate.weight"),
        **_gated("layers.mlp.shared", f"{_LAYER}.mlp.shared_expert"),
        "layers.mlp.shared_gate_D": TensorSource((f"{_LAYER}.mlp.shared_expert_gate.weight",), "row"),
        "layers.mlp.experts.gate_up_ENC": TensorSource(
            (f"{_EXPERT}.gate_proj.weight", f"{_EXPERT}.up_proj.weight"),
            "per_expert",
            fused=f"{_LAYER}.mlp.experts.gate_up_proj",
        ),
        "layers.mlp.experts.down_ENC": TensorSource(
            (f"{_EXPERT}.down_proj.weight",), "per_expert", fused=f"{_LAYER}.mlp.experts.down_proj"
        ),
    },
    skipped={
        r".*\.rotary_emb\.inv_freq": "rotary frequencies follow from the configuration",
        r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector)\..*": "a vision tower: text is served",
    },
)

FAMILIES = {"qwen2_moe": QWEN2_MOE}

MAX_LAYERS = 1000
"""More are a mistake, or meant to take all memory."""


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    """Returns the architecture that a parsed config.json describes.

    Reads the forms of transformers 4 (``rope_theta``, ``rope_scaling``) and 5 (``rope_parameters``, ``layer_types``).

    Raises:
      UserError: the model_type is not supported, a field is missing or has a senseless value, or the model needs
        what is not built (scaled rotary embeddings, already quantized weights).
    """
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise UserError(f"model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    if raw.get("quantization_config") is not None:
        raise UserError("quantization_config is set: already quantized weights are not read, take the original ones")
    return _qwen2_moe(raw)


def _qwen2_moe(raw: dict[str, Any]) -> ModelConfig:
    num_layers = _int(raw, "num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise UserError(f"field 'num_hidden_layers' is {num_layers}, more than {MAX_LAYERS} are taken for a mistake")
    num_heads = _int(raw, "num_attention_heads")
    num_kv_heads = _int(raw, "num_key_value_heads", num_heads)
    hidden_size = _int(raw, "hidden_size")
    head_dim = _int(raw, "head_dim", hidden_size // num_heads)
    num_experts, num_experts_per_tok = _int(raw, "num_experts"), _int(raw, "num_experts_per_tok")
    if raw.get("head_dim") is None and hidden_size % num_heads:
        raise UserError(f"hidden_size {hidden_size} is not a multiple of {num_heads} attention heads")
    if num_heads % num_kv_heads:
        raise UserError(f"{num_heads} attention heads do not divide among {num_kv_heads} key-value heads")
    if head_dim % 2:
        raise UserError(f"rotary embeddings need an even head_dim, got {head_dim}")
    if num_experts_per_tok > num_experts:
        raise UserError(f"num_experts_per_tok {num_experts_per_tok} exceeds num_experts {num_experts}")
    hidden_act = _typed(raw, "hidden_act", str, "silu")
    activation(hidden_act)
    dense_layers = _int_list(raw, "mlp_only_layers")
    sparse_step = _int(raw, "decoder_sparse_step", 1)
    return ModelConfig(
        family="qwen2_moe",
        vocab_size=_int(raw, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_int(raw, "intermediate_size"),
        moe_intermediate_size=_int(raw, "moe_intermediate_size"),
        shared_expert_intermediate_size=_int(raw, "shared_expert_intermediate_size"),
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        norm_topk_prob=_typed(raw, "norm_topk_prob", bool, False),
        hidden_act=hidden_act,
        rms_norm_eps=_float(raw, "rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(raw),
        qkv_bias=_typed(raw, "qkv_bias", bool, True),
        tie_word_embeddings=_typed(raw, "tie_word_embeddings", bool, False),
        max_position_embeddings=_int(raw, "max_position_embeddings"),
        sparse_layers=tuple(i not in dense_layers and (i + 1) % sparse_step == 0 for i in range(num_layers)),
        windows=_windows(raw, num_layers),
        eos_token_ids=eos_token_ids(raw),
    )


def eos_token_ids(raw: dict[str, Any]) -> tuple[int, ...]:
    """Returns the end tokens of a parsed config.json or generation_config.json: an int, a list or nothing there."""
    value = raw.get("eos_token_id")
    return tuple(_int_list({"eos_token_id": [value]} if _is_int(value) else raw, "eos_token_id"))


def _rope_theta(raw: dict[str, Any]) -> float:
    """theta of plain rotary embeddings: transformers 5 nests it in rope_parameters, 4 has it at the top."""
    rope = _typed(raw, "rope_scaling", dict, {}) | _typed(raw, "rope_parameters", dict, {})
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    partial = _float(raw | rope, "partial_rotary_factor", 1.0)
    if rope_type != "default" or partial != 1:
        raise UserError(f"rotary embeddings must be plain and whole, got type {rope_type!r}, rotated part {partial}")
    return _float(raw | rope, "rope_theta", 10000.0)


def _windows(raw: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Sliding-window width per layer. Without layer_types, even layers below max_window_layers slide."""
    if not _typed(raw, "use_sliding_window", bool, False):
        return (0,) * num_layers
    window = _int(raw, "sliding_window")
    types = raw.get("layer_types")
    if types is None:
        sliding_below = _int(raw, "max_window_layers", 28)
        return tuple(window if i % 2 == 0 and i < sliding_below else 0 for i in range(num_layers))
    known = {"sliding_attention": window, "full_attention": 0}
    if not isinstance(types, list) or len(types) != num_layers or any(t not in known for t in types):
        raise UserError(f"layer_types must name {num_layers} layers of {', '.join(known)}, got {types!r}")
    return tuple(known[t] for t in types)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _get(raw: dict[str, Any], name: str, default: Any) -> Any:
    """The field, or the default if it is absent or null."""
    value = raw.get(name)
    if value is not None:
        return value
    if default is _REQUIRED:
        raise UserError(f"field {name!r} is missing")
    return default


def _typed(raw: dict[str, Any], name: str, kind: type, default: Any = _REQUIRED) -> Any:
    value = _get(raw, name, default)
    if not isinstance(value, kind):
        raise UserError(f"field {name!r} must be of type {kind.__name__}, got {value!r}")
    return value


def _int(raw: dict[str, Any], name: str, default: Any = _REQUIRED) -> int:
    value = _get(raw, name, default)
    if not _is_int(value) or value < 1:
        raise UserError(f"field {name!r} must be a positive integer, got {value!r}")
    return value


def _float(raw: dict[str, Any], name: str, default: Any = _REQUIRED) -> float:
    value = _get(raw, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UserError(f"field {name!r} must be a positive number, got {value!r}")
    return float(value)


def _int_list(raw: dict[str, Any], name: str) -> list[int]:
    value = _get(raw, name, [])
    if not isinstance(value, list) or not all(_is_int(v) and v >= 0 for v in value):
        raise UserError(f"field {name!r} must be a list of integers from 0, got {value!r}")
    return value
