# SPDX-License-Identifier: Apache-2.0
"""Frozen configurations: the model's, the pages', the planner's and the server's. All defaults are here."""

from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from pagedweight_jax.errors import UserError
from pallas_kernels.implementation import IMPLEMENTATIONS

GATE_UP, DOWN = 0, 1
"""The linear-block kinds u: indices of every axis U."""

KINDS = ("gate_up", "down")

DTYPES = ("float32", "bfloat16", "float16")
"""What weights are computed in, and what the KV cache holds."""


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, Integral) or value < least:
        raise UserError(f"{name} must be a whole number, at least {least}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder's architecture, independent of the names a family gives its fields. Hashable: it is static under jit.

    Attributes:
      family: Hugging Face's ``model_type``.
      sparse_layers: one bool per layer, True where the feed-forward part is a mixture of experts.
      windows: sliding-window width per layer in tokens, 0 for full attention.
      intermediate_size: width of dense (not sparse) layers.
      moe_intermediate_size: F, width of a routed expert.
      shared_expert_intermediate_size: width of the shared expert, 0 for none.
      eos_token_ids: tokens that end a request unless it says otherwise.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    hidden_act: str
    rms_norm_eps: float
    rope_theta: float
    qkv_bias: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    sparse_layers: tuple[bool, ...]
    windows: tuple[int, ...]
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_sparse_layers(self) -> int:
        """Length of axis L of every routed-expert table: dense layers have no row there."""
        return sum(self.sparse_layers)

    def block_shape(self, kind: int) -> tuple[int, int]:
        """(N, C) of a linear-block of ``kind``: gate_up is [2F, D], down is [D, F]."""
        if kind == GATE_UP:
            return 2 * self.moe_intermediate_size, self.hidden_size
        return self.hidden_size, self.moe_intermediate_size


@dataclass(frozen=True, kw_only=True)
class PlannerConfig:
    """Switches and thresholds of the runtime planner (Algorithm 1).

    Attributes:
      low_watermark_blocks: T_blk of eq. 7; pressure is triggered when no more KV blocks than this are free.
      high_watermark_blocks: precision is raised again only with free KV blocks above this many.
      hysteresis_boundaries: a block lowered within this many boundaries is not raised.
      max_reload_bytes: bytes that one boundary may start to reload.
      routing_statistics: False ignores which experts the running requests use: μ = 1 and no floors or caps.
      prompt_residual: False ignores what the running requests' activations are like: η = 1.
      global_sensitivity: False lowers all blocks alike, highest bits first (uniform bits), the ablation.
      page_movement: False keeps the initial bits, the ablation "no page movement".
    """

    low_watermark_blocks: int = 8
    high_watermark_blocks: int = 16
    hysteresis_boundaries: int = 8
    max_reload_bytes: int = 64 << 20
    routing_statistics: bool = True
    prompt_residual: bool = True
    global_sensitivity: bool = True
    page_movement: bool = True

    def __post_init__(self):
        for name in ("low_watermark_blocks", "high_watermark_blocks", "hysteresis_boundaries", "max_reload_bytes"):
            _check_whole(f"planner: {name}", getattr(self, name), least=0)
        if not self.low_watermark_blocks <= self.high_watermark_blocks:
            raise UserError(
                f"planner watermarks: need low <= high free KV blocks, got low {self.low_watermark_blocks}, "
                f"high {self.high_watermark_blocks}"
            )


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How an engine is laid out.

    Attributes:
      memory_bytes: the budget for everything that lives on the device.
      max_num_seqs: B, decode rows; rows are always padded to it.
      max_model_len: longest context of a request, in tokens.
      prefill_chunk_tokens: tokens of a prefill call; chunk borders lie at its multiples.
      steps_per_call: decode steps between two boundaries.
      mode: ``dynamic`` (the planner decides), ``frozen`` (bits fixed at the start), ``replay`` (a dynamic run's record
        decides, see ``serving.replay``).
      dtype: activations and dense weights on the device; None means bfloat16 on a GPU and float32 elsewhere.
      kv_dtype: dtype of the KV cache.
      bits: in ``frozen`` mode, one uniform bitwidth, or None for the bits that the budget gives.
      kv_tokens: context, over all rows, that the initial bits leave room for; None means every row at
        ``max_model_len`` in ``frozen`` mode, and the high watermark in the others.
      implementation: ``xla`` or ``triton``; None means ``triton`` on an NVIDIA GPU and ``xla`` elsewhere.
    """

    memory_bytes: int
    max_num_seqs: int = 8
    max_model_len: int = 2048
    prefill_chunk_tokens: int = 128
    steps_per_call: int = 8
    mode: Literal["dynamic", "frozen", "replay"] = "dynamic"
    dtype: str | None = None
    kv_dtype: str = "bfloat16"
    bits: int | None = None
    kv_tokens: int | None = None
    implementation: Literal["xla", "triton"] | None = None
    planner: PlannerConfig = PlannerConfig()

    def __post_init__(self):
        for name in ("memory_bytes", "max_num_seqs", "max_model_len", "prefill_chunk_tokens", "steps_per_call"):
            _check_whole(name, getattr(self, name), least=1)
        options = (("dtype", (*DTYPES, None)), ("kv_dtype", DTYPES), ("implementation", (*IMPLEMENTATIONS, None)))
        for name, choices in options:
            if getattr(self, name) not in choices:
                raise UserError(f"{name} must be one of {', '.join(map(str, choices))}, got {getattr(self, name)!r}")
        for name, least in (("bits", 1), ("kv_tokens", 0)):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), least)
        if self.mode not in ("dynamic", "frozen", "replay"):
            raise UserError(f"mode must be dynamic, frozen or replay, got {self.mode!r}")
        if self.bits is not None and self.mode != "frozen":
            raise UserError(f"bits={self.bits} needs mode='frozen': the planner chooses its bits itself")
