# SPDX-License-Identifier: Apache-2.0
"""The mixed-precision MoE feed-forward of a prefill chunk: products grouped over experts on the tensor cores.

Tokens are sorted by expert and cut into tiles (``grouped_order.py``). A program multiplies the tokens of one tile by a
few rows of their expert's linear-block, chunk by chunk (``grouped_products.py``)::

      acc [R, tile]  +=  weights [R, 128]  x  tokens [tile, 128]^T

Up to 4 bits it looks the weights up on the way (``grouped_weights.py``). Wider blocks are dequantized before, a few
experts at a time (``grouped_dequantize.py``). gate_up takes the rows of both halves of the same outputs and stores
their h in the order in which ``down`` reads its columns. Products of bfloat16 are summed in float32, chunk after chunk:
a row's result depends on no other row.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.bitplane import BlockLayout
from pallas_kernels.moe_ffn.api import DEQUANTIZED_BYTES, LOOKED_UP_BITS
from pallas_kernels.moe_ffn.grouped_dequantize import dequantize
from pallas_kernels.moe_ffn.grouped_order import CHUNK, Tiles, make_tiles, num_chunks, order_columns, order_inputs
from pallas_kernels.moe_ffn.grouped_products import looked_up_product, plain_product
from pallas_kernels.moe_ffn.grouped_tile import Config
from pallas_kernels.moe_ffn.pages import ACTIVATIONS, WeightPages
from pallas_kernels.tuning import tuned

KERNEL = "moe_ffn_grouped"
"""Its name in the table of block sizes."""

FEW_PAIRS = 48
"""Pairs an expert has on average up to which small tiles are better."""


def gate_up_rows(down: BlockLayout, num_rows: int) -> jax.Array:
    """Returns ``rows_Q`` of gate_up: the gate rows of R/2 positions of down's columns, then their up rows."""
    f_Q = order_columns(np.arange(down.columns, dtype=np.int32)[None], down, fill=-1)
    f_QR = f_Q.reshape(-1, 1, num_rows // 2)
    return jnp.asarray(np.where(f_QR < 0, -1, 2 * f_QR + np.array([[0], [1]], np.int32)).reshape(-1))


def down_rows(down: BlockLayout, num_rows: int) -> jax.Array:
    """Returns ``rows_Q`` of down: its rows, then -1 up to a multiple of R."""
    row_Q = np.arange(pl.cdiv(down.rows, num_rows) * num_rows, dtype=np.int32)
    return jnp.asarray(np.where(row_Q < down.rows, row_Q, -1))


def gated(activation: str, y_RT: jax.Array) -> jax.Array:
    """Returns act(gate) * up, [R/2, tile], of gate_up's rows in the order of ``gate_up_rows``."""
    half_rows = y_RT.shape[0] // 2
    halves_QT2 = y_RT.reshape(2, half_rows, -1).transpose(1, 2, 0)
    gate_QT, up_QT = (half.reshape(half_rows, -1) for half in jnp.split(halves_QT2, 2, axis=2))
    return ACTIVATIONS[activation](gate_QT) * up_QT


def configure(gate_up: BlockLayout, dtype, pairs_per_expert: float) -> Config:
    """Returns the size of the programs, which changes no result: the table's, or what was fastest on an H200."""
    if dtype != jnp.bfloat16:
        return Config(tile=32, rows=32, num_warps=4, num_stages=1, plain_rows=32, plain_warps=4, plain_stages=1)
    if pairs_per_expert <= FEW_PAIRS:
        return Config(tile=64)
    return Config(**tuned(KERNEL, (gate_up.rows, gate_up.columns), vars(Config(tile=160, plain_tile=160))))


def cut(ids_P: jax.Array, num_experts: int, config: Config, interpret: bool = False) -> tuple[Tiles, Tiles]:
    """Returns the pairs' tiles for blocks that are looked up, and for those that are dequantized before."""
    size, plain_size = config.tiles
    tiles = make_tiles(ids_P, num_experts, size, interpret)
    return tiles, tiles if plain_size == size else make_tiles(ids_P, num_experts, plain_size, interpret)


def grouped_product(
    arena_AW: jax.Array,
    layout: BlockLayout,
    frames_EF: jax.Array,
    bits_EU: jax.Array,
    kind: int,
    tiles: tuple[Tiles, Tiles],
    x_XC: jax.Array,
    rows_of: Callable[[int], jax.Array],
    out: jax.ShapeDtypeStruct,
    finish: Callable[[jax.Array], jax.Array] = lambda y_RT: y_RT,
    *,
    config: Config,
    interpret: bool = False,
) -> jax.Array:
    """Returns finish(W x_p) of every used pair p, ``out`` [P, ..]; rows of unused pairs are not written.

    Args:
      tiles: as ``cut`` returns them.
      rows_of: ``rows_Q`` by the number of a program's rows.
      others: as of ``looked_up_product``.
    """
    options, num_experts = {"config": config, "interpret": interpret}, frames_EF.shape[0]
    if layout.min_bits <= LOOKED_UP_BITS:
        rows_Q = rows_of(config.rows)
        y = looked_up_product(
            arena_AW, layout, frames_EF, bits_EU, kind, tiles[0], x_XC, rows_Q, out, finish, **options
        )  # fmt: skip
    else:
        y = jnp.zeros(out.shape, out.dtype)
    if layout.max_bits <= LOOKED_UP_BITS:
        return y
    rows_Q = rows_of(config.plain_rows)
    expert_bytes = rows_Q.size * num_chunks(layout) * CHUNK * x_XC.dtype.itemsize
    groups = pl.cdiv(num_experts, max(1, DEQUANTIZED_BYTES // expert_bytes))
    count = pl.cdiv(num_experts, groups)
    for first in range(0, num_experts, count):
        experts = range(first, min(first + count, num_experts))
        count_E, y = lax.optimization_barrier((tiles[1].count_E, y))  # one group's weights after the other's
        w_GQC = dequantize(
            arena_AW, layout, frames_EF, bits_EU, kind, count_E, experts, rows_Q, x_XC.dtype, interpret
        )  # fmt: skip
        y = plain_product(w_GQC, first, layout, bits_EU, kind, tiles[1], x_XC, rows_Q, y, finish, **options)
    return y


def products(
    arena_AW: jax.Array,
    pages: WeightPages,
    tiles: tuple[Tiles, Tiles],
    x_TC: jax.Array,
    activation: str,
    config: Config,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns (h_PC, y_PD) of the used pairs: h by ``down``'s positions in x's dtype, and down h in float32.

    Args:
      arena_AW, pages: as of the API.
      tiles: the pairs by expert, as ``cut`` returns them.
      x_TC: tokens' inputs by gate_up's positions.
      activation: a key of ``ACTIVATIONS``.
      config, interpret: of ``grouped_product``.
    """
    gate_up, down, num_pairs = pages.gate_up, pages.down, tiles[0].pairs_P.shape[0]
    options = {"config": config, "interpret": interpret}
    h_PC = grouped_product(
        arena_AW, gate_up, pages.gate_up_frames_EF, pages.bits_EU, 0, tiles, x_TC, partial(gate_up_rows, down),
        jax.ShapeDtypeStruct((num_pairs, num_chunks(down) * CHUNK), x_TC.dtype), partial(gated, activation), **options,
    )  # fmt: skip
    y_PD = grouped_product(
        arena_AW, down, pages.down_frames_EF, pages.bits_EU, 1, tiles, h_PC, partial(down_rows, down),
        jax.ShapeDtypeStruct((num_pairs, down.rows), jnp.float32), **options,
    )  # fmt: skip
    return h_PC, y_PD


def moe_ffn(
    arena_AW: jax.Array,
    pages: WeightPages,
    m_TD: jax.Array,
    ids_TK: jax.Array,
    activation: str,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns (y_TKD, h_square_TK), float32, as the API defines them, for the many tokens of a prefill chunk.

    Args and errors: see ``pallas_kernels.moe_ffn.api.moe_ffn``.
    """
    num_experts = pages.bits_EU.shape[0]
    config = config or configure(pages.gate_up, m_TD.dtype, ids_TK.size / num_experts)
    tiles = cut(ids_TK.reshape(-1), num_experts, config, interpret)
    x_TC = order_inputs(m_TD, pages.gate_up, interpret)
    h_PC, y_PD = products(arena_AW, pages, tiles, x_TC, activation, config, interpret)
    used_TK = ids_TK < num_experts
    y_TKD = jnp.where(used_TK[..., None], y_PD.reshape(*ids_TK.shape, -1), 0.0)
    h_square_P = jnp.sum(jnp.square(h_PC.astype(jnp.float32)), axis=1)
    return y_TKD, jnp.where(used_TK, h_square_P.reshape(ids_TK.shape), 0.0)
