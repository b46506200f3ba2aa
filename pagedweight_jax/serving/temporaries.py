# SPDX-License-Identifier: Apache-2.0
"""What the compiled steps will take beside their arguments, before they are compiled."""

import jax.numpy as jnp

from pagedweight_jax.config import ModelConfig, ServeConfig
from pagedweight_jax.serving.state import Geometry
from pallas_kernels.moe_ffn.api import DECODE_TOKENS, DEQUANTIZED_BYTES, LOOKED_UP_BITS
from pallas_kernels.paged_attention.layout import SPLIT_TOKENS


def estimate_temporary_bytes(model: ModelConfig, geometry: Geometry, config: ServeConfig, dtype: str) -> int:
    """Returns an upper guess of the programs' temporaries, which of all steps the hungriest takes.

    That is a chunk's attention, experts, logits or sums, or a decode call's.

    Args:
      model, geometry: of the served model and its memory.
      config: with an implementation that is chosen.
      dtype: of weights and activations.
    """
    rows, chunk_tokens = config.max_num_seqs, config.prefill_chunk_tokens
    block_values = max(layout.rows * layout.columns for layout in (geometry.gate_up, geometry.down))
    weights_bytes = 2 * 4 * block_values
    if config.implementation == "triton" and chunk_tokens > DECODE_TOKENS:
        weights_bytes = _dequantized_bytes(model, geometry, jnp.dtype(dtype).itemsize * block_values)
    split_values = SPLIT_TOKENS * model.num_kv_heads * model.head_dim
    # Per token: scores of a split, queries and outputs, four residual widths; or gate, up and their product.
    attention_values = 4 * model.num_heads * (SPLIT_TOKENS + model.head_dim) + 4 * model.hidden_size
    expert_values = 4 * model.moe_intermediate_size + 2 * model.hidden_size
    trace_values = model.num_sparse_layers * model.num_experts_per_tok * model.num_experts
    # What a token's experts give, each by itself; XLA on a CPU keeps it twice and lays little else over it.
    outputs_bytes = 2 * 4 * chunk_tokens * model.num_experts_per_tok * model.hidden_size
    return outputs_bytes + max(
        4 * (chunk_tokens * attention_values + 2 * split_values),
        4 * chunk_tokens * expert_values + weights_bytes,
        4 * chunk_tokens * (model.vocab_size + 4 * model.hidden_size),
        4 * rows * (attention_values + 4 * split_values + model.vocab_size),
        4 * 6 * max(chunk_tokens, rows * config.steps_per_call) * trace_values,
    )


def _dequantized_bytes(model: ModelConfig, geometry: Geometry, block_bytes: int) -> int:
    """Returns what a chunk's kernels hold of dequantized blocks at a time: none where all are narrow."""
    if geometry.gate_up.max_bits <= LOOKED_UP_BITS:
        return 0
    return min(model.num_experts * block_bytes, max(DEQUANTIZED_BYTES, block_bytes))
