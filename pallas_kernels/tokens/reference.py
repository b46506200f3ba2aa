# SPDX-License-Identifier: Apache-2.0
"""Definition of a step's beginning and end."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dense import reference as dense

HIGHEST = jnp.iinfo(jnp.int32).max


def read_tokens(
    tokens_T: jax.Array, positions_T: jax.Array, embed_VD: jax.Array, norm_D: jax.Array, eps: float, frequency_R
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Args and result: see ``pallas_kernels.tokens.api.read_tokens``."""
    x_TD = embed_VD[tokens_T]
    angle_TR = jnp.maximum(positions_T, 0)[:, None].astype(jnp.float32) * frequency_R
    return x_TD, dense.rms_norm(x_TD, norm_D, eps), jnp.cos(angle_TR), jnp.sin(angle_TR)


def scores(logits_TV: jax.Array, temperature_T: jax.Array, seed_T: jax.Array, position_T: jax.Array) -> jax.Array:
    """Returns float32[T, V], the largest of which is drawn; see ``pallas_kernels.tokens.api.best_of_blocks``."""

    def of_row(logits_V, temperature, seed, position):
        key = jax.random.fold_in(jax.random.key(seed), position + 1)
        noise_V = jax.random.gumbel(key, logits_V.shape, jnp.float32)
        scaled_V = logits_V / jnp.where(temperature > 0, temperature, 1.0)
        return scaled_V + jnp.where(temperature > 0, noise_V, 0.0)

    return jax.vmap(of_row)(logits_TV, temperature_T, seed_T, position_T)


def rank(x: jax.Array) -> jax.Array:
    """Returns integers in the order of float32 numbers: both zeros are equal, and NaN is above all."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    order = jnp.where(bits < 0, bits ^ HIGHEST, bits)
    return jnp.where(x != x, HIGHEST, jnp.where(x == 0, 0, order))


def best_of_blocks(
    x_TD: jax.Array,
    head: jax.Array,
    transposed: bool,
    temperature_T: jax.Array,
    seed_T: jax.Array,
    position_T: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Args and result: see ``pallas_kernels.tokens.api.best_of_blocks``. All of the vocabulary is one block."""
    return best(scores(dense.logits(x_TD, head, transposed), temperature_T, seed_T, position_T))


def best(scores_TV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (rank_TS, token_TS) of one block of scores."""
    token_T1 = jnp.argmax(scores_TV, axis=1, keepdims=True).astype(jnp.int32)
    return rank(jnp.take_along_axis(scores_TV, token_T1, axis=1)), token_T1


def choose(rank_TS: jax.Array, token_TS: jax.Array) -> jax.Array:
    """Returns int32[T], the token of the highest rank, of equal ones the lowest."""
    best_T1 = jnp.max(rank_TS, axis=1, keepdims=True)
    return jnp.min(jnp.where(rank_TS == best_T1, token_TS, HIGHEST), axis=1)


def advance(
    rank_BS: jax.Array, token_BS: jax.Array, rows: tuple, stop_ids_BI: jax.Array, tokens_NB: jax.Array, step: jax.Array
) -> tuple[tuple, jax.Array]:
    """Args and result: see ``pallas_kernels.tokens.api.advance``."""
    last_tokens_B, _, lengths_B, remaining_B = rows
    drawn_B = choose(rank_BS, token_BS)
    token_B, rows = next_rows(drawn_B, last_tokens_B, lengths_B, remaining_B, stop_ids_BI)
    return rows, tokens_NB.at[step].set(token_B)


def next_rows(drawn, last_token, length, remaining, stop_ids_I) -> tuple[jax.Array, tuple]:
    """Returns (token or -1, (last token, position, length, remaining)) of rows, or of one, that drew ``drawn``."""
    active = remaining > 0
    token = jnp.where(active, drawn, -1)
    stopped = jnp.max((token[..., None] == stop_ids_I).astype(jnp.int32), axis=-1) > 0
    length = length + active.astype(jnp.int32)
    remaining = jnp.where(stopped, 0, remaining - active.astype(jnp.int32))
    position = jnp.where(remaining > 0, length, -1)
    return token, (jnp.where(active, token, last_token), position, length, remaining)
