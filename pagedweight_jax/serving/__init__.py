# SPDX-License-Identifier: Apache-2.0
"""Serving: ``LLM`` for texts, ``Engine`` for requests, ``load`` and the jitted steps for a loop of one's own."""

from pagedweight_jax.serving.engine import Engine
from pagedweight_jax.serving.kv_blocks import KVBlocks
from pagedweight_jax.serving.llm import LLM
from pagedweight_jax.serving.loading import load
from pagedweight_jax.serving.request import RequestOutput, SamplingParams
from pagedweight_jax.serving.steps import assign_row, decode_loop, decode_step, prefill_step, score_step

__all__ = [
    "LLM",
    "Engine",
    "KVBlocks",
    "RequestOutput",
    "SamplingParams",
    "assign_row",
    "decode_loop",
    "decode_step",
    "load",
    "prefill_step",
    "score_step",
]
