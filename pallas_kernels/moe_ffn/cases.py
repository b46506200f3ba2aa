# SPDX-License-Identifier: Apache-2.0
"""What the MoE kernels are held to their definition on."""

from functools import partial

import numpy as np

from pallas_kernels.cases import KernelCase
from pallas_kernels.moe_ffn import arg_specs, reference
from pallas_kernels.moe_ffn.arg_specs import MoESpec, random_pages, random_tokens

TINY = MoESpec(  # both ways from codes to sums
    name="tiny", hidden_size=160, expert_width=96, num_experts=4, top_k=2, frame_words=512, min_bits=4, max_bits=5
)


def make_args(num_tokens: int, dtype: str, seed: int) -> tuple:
    """Returns ``moe_ffn``'s arrays; experts at all bitwidths."""
    bits_EU = np.random.default_rng(seed).integers(TINY.min_bits, TINY.max_bits + 1, (TINY.num_experts, 2))
    return *random_pages(TINY, bits_EU, seed), *random_tokens(TINY, num_tokens, seed, dtype)


def cases(interpret: bool) -> list[KernelCase]:
    """Returns decode steps and chunks of a prompt, of real sizes or of a small one where kernels are interpreted."""
    if not interpret:
        return arg_specs.cases()
    from pallas_kernels.moe_ffn import grouped, pallas_triton  # JAX may be without Triton: ask only when it is wanted

    small = grouped.Config(tile=16, rows=32, num_warps=4, num_stages=1)
    chunk = partial(grouped.moe_ffn, config=small)
    return [
        KernelCase(
            kernel="moe_ffn",
            name=f"{what}, {TINY.name}, {num_tokens} tokens",
            make_args=partial(make_args, num_tokens, dtype),
            run=partial(run, activation="silu", interpret=True),
            reference=partial(reference.moe_ffn, activation="silu"),
            tolerance=tolerance,
        )
        for what, run, num_tokens, dtype, tolerance in (
            ("decode", pallas_triton.moe_ffn, 3, "float32", 1e-5),
            ("prefill", chunk, 70, "bfloat16", 1e-2),
        )
    ]
