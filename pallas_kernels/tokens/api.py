# SPDX-License-Identifier: Apache-2.0
"""From tokens to the first layer's rows, and from the last layer's to the next tokens: their meaning.

A decode step's beginning and end are many small operations that wait for each other. Here they are three launches: one
before the layers, the head with the best token of each block of the vocabulary, and one that ends the step.
"""

from typing import NamedTuple

import jax

from pallas_kernels.implementation import module_of
from pallas_kernels.tokens.reference import choose

__all__ = ["Rows", "advance", "best_of_blocks", "choose", "read_tokens"]


class Rows(NamedTuple):
    """Where B rows of a batch stand.

    Attributes:
      last_tokens_B: int32, the token that each row's next step reads.
      positions_B: int32, where it stands; -1 for a row that is not decoding.
      lengths_B: int32, tokens of each row whose KV is in the cache.
      remaining_B: int32, tokens each row may still produce; 0 for a row that is not decoding.
    """

    last_tokens_B: jax.Array
    positions_B: jax.Array
    lengths_B: jax.Array
    remaining_B: jax.Array


def read_tokens(
    tokens_T: jax.Array,
    positions_T: jax.Array,
    embed_VD: jax.Array,
    norm_D: jax.Array,
    eps: float,
    frequency_R: jax.Array,
    *,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns (x_TD, its RMS norm, cos_TR, sin_TR): embeddings of tokens, and the angles ``position * frequency``.

    Args:
      tokens_T: int32.
      positions_T: int32; of a negative one the results mean nothing.
      embed_VD: the embedding.
      norm_D, eps: the first norm's weights, and what is added to the mean square.
      frequency_R: float32.
      implementation: "xla", the definition, or "triton", a Pallas kernel for NVIDIA GPUs.

    Raises:
      ValueError: an unknown implementation, or shapes that do not agree.
    """
    if tokens_T.shape != positions_T.shape or norm_D.shape != embed_VD.shape[1:]:
        shapes = ", ".join(str(a.shape) for a in (tokens_T, positions_T, embed_VD, norm_D))
        raise ValueError(f"shapes disagree: tokens, positions, embedding and norm {shapes}")
    run = module_of(__package__, implementation).read_tokens
    return run(tokens_T, positions_T, embed_VD, norm_D, eps, frequency_R)


def best_of_blocks(
    x_TD: jax.Array,
    head: jax.Array,
    temperature_T: jax.Array,
    seed_T: jax.Array,
    position_T: jax.Array,
    *,
    transposed: bool = False,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Returns (rank_TS, token_TS), int32: of each of S blocks of the vocabulary the token to draw, and how it ranks.

    ``choose`` draws the one of the highest rank. A row's draw is a function of its own logits ``x @ head``, seed and
    position alone (Gumbel-max over logits / temperature), so it does not depend on the batch, the row or how steps are
    grouped into calls. Temperature 0 takes the largest logit; of equal ones the lowest id, of a NaN and others the NaN.

    Args:
      x_TD: hidden states after the final norm.
      head: [D, V]; or [V, D], the embedding, where ``transposed``.
      temperature_T: float32, 0 for greedy.
      seed_T: uint32.
      position_T: int32, where the row's last token stands; the one that is drawn stands behind it.
      transposed: whether the head is stored [V, D]; it is read as it lies.
      implementation: "xla", the definition, or "triton", a Pallas kernel for NVIDIA GPUs.

    Raises:
      ValueError: an unknown implementation, or shapes that do not agree.
    """
    if x_TD.shape[-1] != head.shape[1 if transposed else 0] or any(
        len(a) != len(x_TD) for a in (temperature_T, seed_T, position_T)
    ):
        shapes = ", ".join(str(a.shape) for a in (temperature_T, seed_T, position_T))
        raise ValueError(f"shapes disagree: rows {x_TD.shape}, head {head.shape}, transposed {transposed}; {shapes}")
    run = module_of(__package__, implementation).best_of_blocks
    return run(x_TD, head, transposed, temperature_T, seed_T, position_T)


def advance(
    rank_BS: jax.Array,
    token_BS: jax.Array,
    rows: Rows,
    stop_ids_BI: jax.Array,
    tokens_NB: jax.Array,
    step: jax.Array,
    *,
    implementation: str = "xla",
) -> tuple[Rows, jax.Array]:
    """Returns (rows, tokens_NB) after a step: each row that is decoding drew a token and is one token longer.

    A row that drew one of its stop ids, or its last allowed token, stops decoding.

    Args:
      rank_BS, token_BS: of ``best_of_blocks``.
      rows: before the step.
      stop_ids_BI: int32, tokens that end a row, padded with -1.
      tokens_NB: int32, what is drawn in N steps; row ``step`` is written, -1 for rows that are not decoding.
      step: int32 scalar.
      implementation: "xla", the definition, or "triton", a Pallas kernel for NVIDIA GPUs.

    Raises:
      ValueError: an unknown implementation, or shapes that do not agree.
    """
    arrays = rank_BS, token_BS, *rows, stop_ids_BI, tokens_NB.T
    if any(len(a) != len(rank_BS) for a in arrays) or rank_BS.shape != token_BS.shape:
        raise ValueError(f"shapes disagree: {', '.join(str(a.shape) for a in arrays)}")
    found = module_of(__package__, implementation).advance(rank_BS, token_BS, tuple(rows), stop_ids_BI, tokens_NB, step)
    return Rows(*found[0]), found[1]
