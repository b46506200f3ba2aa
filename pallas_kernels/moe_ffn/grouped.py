# SPDX-License-Identifier: Apache-2.0
"""The mixed-precision MoE feed-forward of a prefill chunk: products grouped over experts on the tensor cores.

Tokens are sorted by expert and cut into tiles (``grouped_order.py``). A program multiplies the tokens of one tile by a
few rows of their expert's linear-block, whose weights it looks up chunk by chunk (``grouped_weights.py``)::

      acc [R, tile]  +=  weights [R, 128]  x  tokens [tile, 128]^T

gate_up takes the rows of both halves of the same outputs and stores their h in the order in which ``down`` reads its
columns. Products of bfloat16 are summed in float32, chunk after chunk: a row's result depends on no other row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams, load, store
from pallas_kernels.bitplane import BlockLayout
from pallas_kernels.moe_ffn.grouped_order import (
    CHUNK,
    WORDS,
    Tiles,
    loaded_rows,
    make_tiles,
    num_chunks,
    order_columns,
    whole_chunks,
)
from pallas_kernels.moe_ffn.grouped_weights import REGISTER_BITS, Rows
from pallas_kernels.moe_ffn.pages import ACTIVATIONS, WeightPages

FEW_PAIRS = 48
"""Pairs an expert has on average up to which small tiles are better."""

NARROW_BITS = 4
"""Bitwidths up to this one share a body, as do those whose LUTs are too large for registers."""


@dataclass(frozen=True)
class Config:
    """How the products are cut into programs.

    Attributes:
      tile: tokens of a program, a multiple of 16.
      rows: R of a program, a power of two; 16 a warp keep the words where they are multiplied.
      num_warps, num_stages: of a program, a power of two, and the depth of the pipeline of loads.
    """

    tile: int
    rows: int = 64
    num_warps: int = 4
    num_stages: int = 2

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(first, size) of the powers of two that add up to the tile, largest first."""
        found, first = [], 0
        for bit in reversed(range(self.tile.bit_length())):
            if self.tile >> bit & 1:
                found.append((first, 1 << bit))
                first += 1 << bit
        return found


def planes_for(bits: int, layout: BlockLayout) -> int:
    """Returns the planes of the body that multiplies blocks of ``bits``; those they do not have are zeros."""
    planes = layout.max_bits if bits > REGISTER_BITS else max(bits, NARROW_BITS)
    return max(min(planes, layout.max_bits), 2)


def _dot(w_RC, x_TC):
    """Returns w x^T, float32; exact products, also of float32 operands."""
    precision = lax.Precision.HIGHEST if w_RC.dtype == jnp.float32 else None
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(w_RC, x_TC, dims, precision=precision, preferred_element_type=jnp.float32)


def grouped_product(
    arena_AW: jax.Array,
    layout: BlockLayout,
    frames_EF: jax.Array,
    bits_EU: jax.Array,
    kind: int,
    tiles: Tiles,
    x_XC: jax.Array,
    rows_Q: jax.Array,
    out: jax.ShapeDtypeStruct,
    finish: Callable[[jax.Array], jax.Array] = lambda y_RT: y_RT,
    *,
    config: Config,
    interpret: bool = False,
) -> jax.Array:
    """Returns finish(W x_p) of every used pair p, ``out`` [P, ..]; rows of unused pairs are not written.

    Args:
      arena_AW: uint32 frames.
      layout: of the blocks.
      frames_EF: int32, the blocks' frames.
      bits_EU, kind: bitwidths, and the column of them that belongs to these blocks.
      tiles: the pairs by expert.
      x_XC: inputs in the order of ``order_columns``; pair p reads row p // (P / X).
      rows_Q: int32, the stored rows in the order in which programs take them, R at a time; -1 where there is none.
      out: shape and dtype of the result.
      finish: from a program's [R, tile] to what it stores, as many rows or half of them.
      config: size of a program.
      interpret: runs on any backend, slowly.
    """
    num_experts, num_rows = frames_EF.shape[0], config.rows
    pairs_per_row = tiles.pairs_P.shape[0] // x_XC.shape[0]
    bodies = sorted({planes_for(bits, layout) for bits in range(layout.min_bits, layout.max_bits + 1)})

    def kernel(arena, halves, frames, bits_ref, pairs, expert, firsts, counts, rows, x, out_ref):
        program, tile = pl.program_id(0), pl.program_id(1)
        e = expert[tile]

        def multiply(planes, bits):
            row_R = jnp.maximum(rows[program * num_rows + loaded_rows(num_rows, config.num_warps)], 0)
            row_R4 = jnp.broadcast_to(row_R[:, None], (num_rows, WORDS))
            block = Rows(
                layout, planes, config.num_warps, arena, halves, frames, e, bits, row_R4, x_XC.dtype, interpret
            )  # fmt: skip
            lut, whole, parts = block.lut(), whole_chunks(layout), []
            for first, size in config.parts:
                slot_T = first + jnp.arange(size, dtype=jnp.int32)
                there_T = slot_T < counts[tile]
                pair_T = load(pairs.at[firsts[tile] + slot_T], mask=there_T, other=jnp.int32(0))
                parts.append((slot_T, there_T, pair_T))

            def product(chunk, words, sums):
                w_RC = block.look_up(words, lut)
                column_1C = chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)[None]
                added = []
                for _, there_T, pair_T in parts:
                    there_TC = jnp.broadcast_to(there_T[:, None], (there_T.size, CHUNK))
                    x_row_T1 = (pair_T // pairs_per_row)[:, None]
                    added.append(_dot(w_RC, load(x.at[x_row_T1, column_1C], mask=there_TC, other=0.0)))
                return [acc_RT + added_RT for acc_RT, added_RT in zip(sums, added)]

            def add_chunk(chunk, carry):
                frames_, words, sums = carry  # words are loaded a chunk ahead, their frames two: nothing waits for them
                next_words = block.words(jnp.minimum(chunk + 1, whole - 1), frames_)
                next_frames = block.frames_of(jnp.minimum(chunk + 2, whole - 1))
                return next_frames, next_words, product(chunk, words, sums)

            sums = [jnp.zeros((num_rows, size), jnp.float32) for _, size in config.parts]
            if whole:
                words = block.words(jnp.int32(0), block.frames_of(jnp.int32(0)))
                carry = block.frames_of(jnp.int32(min(1, whole - 1))), words, sums
                *_, sums = lax.fori_loop(0, whole, add_chunk, carry)
            for chunk in range(whole, num_chunks(layout)):
                sums = product(chunk, block.words(chunk, block.frames_of(chunk)), sums)
            for acc_RT, (slot_T, there_T, pair_T) in zip(sums, parts):
                y_QT = finish(acc_RT)
                position_Q = program * y_QT.shape[0] + jnp.arange(y_QT.shape[0], dtype=jnp.int32)
                exists_Q = rows[program * num_rows + jnp.arange(y_QT.shape[0], dtype=jnp.int32)] >= 0
                y_QT = jnp.where(exists_Q[:, None], y_QT, 0.0).astype(out.dtype)
                inside_QT = there_T[None] & (position_Q < out.shape[1])[:, None]
                place_T = jnp.where(there_T, pair_T, out.shape[0] + slot_T)  # masked ones are past the end
                store(out_ref.at[place_T[None], position_Q[:, None]], y_QT, mask=inside_QT)

        @pl.when(e < num_experts)
        def _():
            bits = bits_ref[e, kind]
            for i, planes in enumerate(bodies):
                chosen = (bits <= planes) & (bits > bodies[i - 1]) if i else bits <= planes
                pl.when(chosen)(lambda planes=planes: multiply(planes, bits))

    ints = lax.bitcast_convert_type(arena_AW, jnp.int32)  # views: no copies
    halves = lax.bitcast_convert_type(arena_AW, jnp.float16).reshape(arena_AW.shape[0], -1)
    return pl.pallas_call(
        kernel,
        grid=(rows_Q.shape[0] // num_rows, tiles.expert_N.shape[0]),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 10,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=out,
        compiler_params=CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="grouped_gate_up" if layout.interleaved else "grouped_down",
    )(
        ints, halves, frames_EF, bits_EU, tiles.pairs_P, tiles.expert_N, tiles.first_N, tiles.count_N, rows_Q, x_XC
    )  # fmt: skip


def gate_up_rows(down: BlockLayout, num_rows: int) -> jax.Array:
    """Returns ``rows_Q`` of gate_up: the gate rows of R/2 positions of down's columns, then their up rows."""
    f_Q = order_columns(np.arange(down.columns, dtype=np.int32)[None], down, fill=-1)
    f_QR = f_Q.reshape(-1, 1, num_rows // 2)
    return jnp.asarray(np.where(f_QR < 0, -1, 2 * f_QR + np.array([[0], [1]], np.int32)).reshape(-1))


def configure(dtype, pairs_per_expert: float) -> Config:
    """Returns the size of the programs, by what was fastest on an H200; the tile changes no result."""
    if dtype != jnp.bfloat16:
        return Config(tile=32, rows=32, num_warps=4, num_stages=1)
    return Config(tile=192 if pairs_per_expert > FEW_PAIRS else 64)


def products(
    arena_AW: jax.Array,
    pages: WeightPages,
    tiles: Tiles,
    x_TC: jax.Array,
    activation: str,
    config: Config,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns (h_PC, y_PD) of the used pairs: h by ``down``'s positions in x's dtype, and down h in float32.

    Args:
      arena_AW, pages: as of the API.
      tiles: the pairs by expert, cut into tiles of ``config.tile``.
      x_TC: tokens' inputs by gate_up's positions.
      activation: a key of ``ACTIVATIONS``.
      config, interpret: of ``grouped_product``.
    """
    act, num_pairs, num_rows = ACTIVATIONS[activation], tiles.pairs_P.shape[0], config.rows

    def gated(y_RT):
        halves_QT2 = y_RT.reshape(2, num_rows // 2, -1).transpose(1, 2, 0)
        gate_QT, up_QT = (half.reshape(num_rows // 2, -1) for half in jnp.split(halves_QT2, 2, axis=2))
        return act(gate_QT) * up_QT

    def product(layout, frames_EF, kind, x_XC, rows_Q, out, *finish):
        return grouped_product(
            arena_AW, layout, frames_EF, pages.bits_EU, kind, tiles, x_XC, rows_Q, out, *finish,
            config=config, interpret=interpret,
        )  # fmt: skip

    rows_Q = gate_up_rows(pages.down, num_rows)
    h_shape = jax.ShapeDtypeStruct((num_pairs, rows_Q.size // 2), x_TC.dtype)
    h_PC = product(pages.gate_up, pages.gate_up_frames_EF, 0, x_TC, rows_Q, h_shape, gated)
    rows_Q = jnp.arange(pl.cdiv(pages.down.rows, num_rows) * num_rows, dtype=jnp.int32)
    rows_Q = jnp.where(rows_Q < pages.down.rows, rows_Q, -1)
    y_shape = jax.ShapeDtypeStruct((num_pairs, pages.down.rows), jnp.float32)
    return h_PC, product(pages.down, pages.down_frames_EF, 1, h_PC, rows_Q, y_shape)


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
    config = config or configure(m_TD.dtype, ids_TK.size / num_experts)
    tiles = make_tiles(ids_TK.reshape(-1), num_experts, config.tile, interpret)
    x_TC = order_columns(m_TD, pages.gate_up)
    h_PC, y_PD = products(arena_AW, pages, tiles, x_TC, activation, config, interpret)
    used_TK = ids_TK < num_experts
    y_TKD = jnp.where(used_TK[..., None], y_PD.reshape(*ids_TK.shape, -1), 0.0)
    h_square_P = jnp.sum(jnp.square(h_PC.astype(jnp.float32)), axis=1)
    return y_TKD, jnp.where(used_TK, h_square_P.reshape(ids_TK.shape), 0.0)
