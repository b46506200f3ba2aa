# SPDX-License-Identifier: Apache-2.0
"""A step's beginning and end on NVIDIA GPUs: three Pallas-Triton kernels, under the names of ``reference.py``.

The head's product keeps no logits: a program finds the best token of its own columns. Noise is drawn only where some
row wants it.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams, load, store
from pallas_kernels.dense import pallas_triton as dense
from pallas_kernels.dense.add_norm import MAX_TOKENS, NUM_WARPS, over_rms
from pallas_kernels.dense.columns import ROWS, Cut, block_columns, choose_cut, launch, multiply, operand_dtype
from pallas_kernels.tokens import noise, reference
from pallas_kernels.tokens.reference import HIGHEST

LOWEST = -HIGHEST - 1


def read_tokens(
    tokens_T: jax.Array,
    positions_T: jax.Array,
    embed_VD: jax.Array,
    norm_D: jax.Array,
    eps: float,
    frequency_R: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Args and result: see ``pallas_kernels.tokens.api.read_tokens``."""
    num_tokens, (vocab, width), num_angles = len(tokens_T), embed_VD.shape, len(frequency_R)
    if num_tokens > MAX_TOKENS:
        return reference.read_tokens(tokens_T, positions_T, embed_VD, norm_D, eps, frequency_R)

    def kernel(tokens, positions, embed, norm, frequency, x_out, normed_out, cos_out, sin_out):
        t = pl.program_id(0)
        c_D, r_R = (jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32) for size in (width, num_angles))
        inside_D, inside_R = c_D < width, r_R < num_angles
        token = jnp.minimum(jnp.maximum(tokens[t], 0), vocab - 1)
        norm_D = load(norm.at[c_D], mask=inside_D, other=0.0)
        angle_R = jnp.maximum(positions[t], 0).astype(jnp.float32) * load(frequency.at[r_R], mask=inside_R, other=0.0)
        x_D = load(embed.at[token, c_D], mask=inside_D, other=0.0)
        store(cos_out.at[t, r_R], jnp.cos(angle_R), mask=inside_R)
        store(sin_out.at[t, r_R], jnp.sin(angle_R), mask=inside_R)
        store(x_out.at[t, c_D], x_D, mask=inside_D)
        store(normed_out.at[t, c_D], over_rms(x_D, width, eps) * norm_D.astype(x_D.dtype), mask=inside_D)

    rows = jax.ShapeDtypeStruct((num_tokens, width), embed_VD.dtype)
    angles = jax.ShapeDtypeStruct((num_tokens, num_angles), jnp.float32)
    params = CompilerParams(num_warps=NUM_WARPS, num_stages=1)
    args = tokens_T, positions_T, embed_VD, norm_D, frequency_R
    return launch(kernel, "read_tokens", num_tokens, (rows, rows, angles, angles), params, interpret, *args)


def best_of_blocks(
    x_TD: jax.Array,
    head: jax.Array,
    transposed: bool,
    temperature_T: jax.Array,
    seed_T: jax.Array,
    position_T: jax.Array,
    *,
    cut: Cut | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Args and result: see ``pallas_kernels.tokens.api.best_of_blocks``."""
    num_tokens, num_columns = len(x_TD), head.shape[0 if transposed else 1]
    if num_tokens > ROWS:
        logits_TV = dense.logits(x_TD, head, transposed, interpret=interpret)
        return reference.best(reference.scores(logits_TV, temperature_T, seed_T, position_T))
    cut = cut or choose_cut(num_columns, operand_dtype(x_TD, head))
    blocks = pl.cdiv(num_columns, cut.columns)

    def kernel(x, w, temperature, seed, position, rank_out, token_out):
        block, row_R = pl.program_id(0), jnp.arange(ROWS, dtype=jnp.int32)
        column_1N, there_R = block_columns(block, cut)[None], row_R < num_tokens
        temperature_R1, seed_R1, position_R1 = (  # ahead of the loop, so that nothing waits for them behind it
            load(ref.at[row_R], mask=there_R, other=jnp.zeros((), ref.dtype))[:, None]
            for ref in (temperature, seed, position)
        )
        warm_R1 = temperature_R1 > 0
        (y_RN,) = multiply(x, [w], column_1N[0], cut, transposed=transposed)

        def noisy(y_RN):
            noise_RN = noise.gumbel(seed_R1, position_R1 + 1, column_1N)
            return jnp.where(warm_R1, y_RN / jnp.where(warm_R1, temperature_R1, 1.0) + noise_RN, y_RN)

        y_RN = lax.cond(jnp.max(temperature_R1) > 0, noisy, lambda y_RN: y_RN, y_RN)
        rank_RN = jnp.where(column_1N < num_columns, reference.rank(y_RN), LOWEST)
        best_R = jnp.max(rank_RN, axis=1)
        token_R = jnp.min(jnp.where(rank_RN == best_R[:, None], column_1N, HIGHEST), axis=1)
        store(rank_out.at[row_R, block], best_R, mask=there_R)
        store(token_out.at[row_R, block], token_R, mask=there_R)

    out_shape = (jax.ShapeDtypeStruct((num_tokens, blocks), jnp.int32),) * 2
    args = x_TD, head, temperature_T, seed_T, position_T
    return launch(kernel, "best_of_blocks", blocks, out_shape, cut.params, interpret, *args)


def advance(
    rank_BS: jax.Array,
    token_BS: jax.Array,
    rows: tuple,
    stop_ids_BI: jax.Array,
    tokens_NB: jax.Array,
    step: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[tuple, jax.Array]:
    """Args and result: see ``pallas_kernels.tokens.api.advance``. Rows and tokens are written where they are."""
    (num_rows, blocks), num_stops = rank_BS.shape, stop_ids_BI.shape[1]

    def kernel(*refs):
        last, _, length, remaining, _, ranks, tokens, stop_ids, step, *outs = refs
        b = pl.program_id(0)
        s_S, i_I = (jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32) for size in (blocks, num_stops))
        rank_S = load(ranks.at[b, s_S], mask=s_S < blocks, other=jnp.int32(LOWEST))
        token_S = load(tokens.at[b, s_S], mask=s_S < blocks, other=jnp.int32(HIGHEST))
        stop_I = load(stop_ids.at[b, i_I], mask=i_I < num_stops, other=jnp.int32(-1))
        before, n = (last[b], length[b], remaining[b]), step[0]
        drawn = jnp.min(jnp.where(rank_S == jnp.max(rank_S), token_S, HIGHEST))
        token, after = reference.next_rows(drawn, *before, stop_I)
        for out, value in zip(outs, after, strict=False):
            out[b] = value
        outs[-1][n, b] = token

    updated = *rows, tokens_NB
    args = *updated, rank_BS, token_BS, stop_ids_BI, jnp.reshape(step, 1)
    *rows, tokens_NB = pl.pallas_call(
        kernel,
        grid=(num_rows,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(args),
        out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(updated),
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in updated],
        input_output_aliases={i: i for i in range(len(updated))},
        compiler_params=CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="advance",
    )(*args)
    return tuple(rows), tokens_NB
