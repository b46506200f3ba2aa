# SPDX-License-Identifier: Apache-2.0
"""Products of tiles of pairs with their experts' linear-blocks, looked up on the way or dequantized before."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams
from pallas_kernels._triton_inside import limit_registers
from pallas_kernels.bitplane import BlockLayout
from pallas_kernels.moe_ffn.api import LOOKED_UP_BITS
from pallas_kernels.moe_ffn.grouped_order import CHUNK, WORDS, Tiles, loaded_rows, num_chunks, whole_chunks
from pallas_kernels.moe_ffn.grouped_tile import Config, add_products, parts_of, write, zero_sums
from pallas_kernels.moe_ffn.grouped_weights import Rows

LOOK_AHEAD_CHUNKS = 16
"""Whole chunks from which on a program looks weights up a chunk ahead, while the next inputs arrive. That costs one
look-up in vain, and a way through shared memory."""

STEP = 64
"""Columns that a program of ``plain_product`` multiplies at a time."""

PLAIN_PROGRAMS = 2
"""Of them a multiprocessor's registers hold: one multiplies while the other waits."""


def looked_up_product(
    arena_AW: jax.Array,
    layout: BlockLayout,
    frames_EF: jax.Array,
    bits_EU: jax.Array,
    kind: int,
    tiles: Tiles,
    x_XC: jax.Array,
    rows_Q: jax.Array,
    out: jax.ShapeDtypeStruct,
    finish: Callable[[jax.Array], jax.Array],
    *,
    config: Config,
    interpret: bool = False,
) -> jax.Array:
    """Returns finish(W x_p) of every pair p whose block has at most ``LOOKED_UP_BITS`` bits, ``out`` [P, ..].

    Other pairs' rows are not written.

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
    planes = max(min(LOOKED_UP_BITS, layout.max_bits), 2)

    def kernel(arena, frames, bits_ref, pairs, expert, firsts, counts, rows, x, out_ref):
        program, tile = pl.program_id(0), pl.program_id(1)
        e = expert[tile]
        bits = bits_ref[jnp.minimum(e, num_experts - 1), kind]

        def multiply():
            row_R = jnp.maximum(rows[program * num_rows + loaded_rows(num_rows, config.num_warps)], 0)
            row_R4 = jnp.broadcast_to(row_R[:, None], (num_rows, WORDS))
            block = Rows(layout, planes, config.num_warps, arena, frames, e, bits, row_R4, x_XC.dtype, interpret)
            lut, whole = block.lut(), whole_chunks(layout)
            parts = parts_of(config.tile, pairs, firsts[tile], counts[tile])

            def at(chunk):
                return jnp.minimum(chunk, whole - 1)

            def product(chunk, w_RC, sums):
                columns_C = chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
                return add_products(sums, w_RC, x, columns_C, parts, pairs_per_row)

            def add_chunk(chunk, carry):
                frames_, words, sums = carry  # words are loaded a chunk ahead, their frames two: nothing waits for them
                next_words, next_frames = block.words(at(chunk + 1), frames_), block.frames_of(at(chunk + 2))
                return next_frames, next_words, product(chunk, block.look_up(words, lut), sums)

            def add_chunk_and_look_ahead(chunk, carry):
                frames_, words, w_RC, sums = carry
                sums = product(chunk, w_RC, sums)
                next_words, next_frames = block.words(at(chunk + 2), frames_), block.frames_of(at(chunk + 3))
                return next_frames, next_words, block.look_up(words, lut), sums

            sums = zero_sums(num_rows, parts)
            if whole:
                words = block.words(at(0), block.frames_of(at(0)))
                if whole < LOOK_AHEAD_CHUNKS:
                    carry = block.frames_of(at(1)), words, sums
                    *_, sums = lax.fori_loop(0, whole, add_chunk, carry)
                else:
                    next_words = block.words(at(1), block.frames_of(at(1)))
                    carry = block.frames_of(at(2)), next_words, block.look_up(words, lut), sums
                    *_, sums = lax.fori_loop(0, whole, add_chunk_and_look_ahead, carry)
            for chunk in range(whole, num_chunks(layout)):
                w_RC = block.look_up(block.words(chunk, block.frames_of(chunk)), lut)
                sums = product(chunk, w_RC, sums)
            for sum_RT, part in zip(sums, parts, strict=True):
                write(out_ref, out, finish(sum_RT), program, rows, num_rows, part)

        pl.when((e < num_experts) & (bits <= LOOKED_UP_BITS))(multiply)

    ints = lax.bitcast_convert_type(arena_AW, jnp.int32)  # a view: no copy
    return pl.pallas_call(
        kernel,
        grid=(rows_Q.shape[0] // num_rows, tiles.expert_N.shape[0]),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 9,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=out,
        compiler_params=CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="grouped_gate_up" if layout.interleaved else "grouped_down",
    )(ints, frames_EF, bits_EU, tiles.pairs_P, tiles.expert_N, tiles.first_N, tiles.count_N, rows_Q, x_XC)


def plain_product(
    w_GQC: jax.Array,
    first_expert: int,
    layout: BlockLayout,
    bits_EU: jax.Array,
    kind: int,
    tiles: Tiles,
    x_XC: jax.Array,
    rows_Q: jax.Array,
    y: jax.Array,
    finish: Callable[[jax.Array], jax.Array],
    *,
    config: Config,
    interpret: bool = False,
) -> jax.Array:
    """Returns ``y`` with finish(W x_p) of every pair p whose block is among ``w_GQC``, in its place.

    Args:
      w_GQC: weights of some experts as ``dequantize`` returns them.
      first_expert: the first of them.
      y: the other pairs' results.
      others: as of ``looked_up_product``.
    """
    num_experts, num_rows = bits_EU.shape[0], config.plain_rows
    pairs_per_row = tiles.pairs_P.shape[0] // x_XC.shape[0]

    def kernel(w, bits_ref, pairs, expert, firsts, counts, rows, x, _, out_ref):
        program, tile = pl.program_id(0), pl.program_id(1)
        if not interpret:
            program = limit_registers(program, min(65536 // (32 * config.plain_warps * PLAIN_PROGRAMS), 255))
        e = expert[tile]
        bits = bits_ref[jnp.minimum(e, num_experts - 1), kind]

        def multiply():
            row_R1 = program * num_rows + jnp.arange(num_rows, dtype=jnp.int32)[:, None]
            parts = parts_of(config.tiles[1], pairs, firsts[tile], counts[tile])

            def add_step(i, sums):
                columns_C = i * STEP + jnp.arange(STEP, dtype=jnp.int32)
                w_RC = w[e - first_expert, row_R1, columns_C[None]]
                return add_products(sums, w_RC, x, columns_C, parts, pairs_per_row)

            sums = lax.fori_loop(0, w_GQC.shape[2] // STEP, add_step, zero_sums(num_rows, parts))
            for sum_RT, part in zip(sums, parts, strict=True):
                write(out_ref, y, finish(sum_RT), program, rows, num_rows, part)

        here = (e >= first_expert) & (e < first_expert + w_GQC.shape[0])
        pl.when(here & (bits > LOOKED_UP_BITS))(multiply)

    inputs = w_GQC, bits_EU, tiles.pairs_P, tiles.expert_N, tiles.first_N, tiles.count_N, rows_Q, x_XC, y
    return pl.pallas_call(
        kernel,
        grid=(rows_Q.shape[0] // num_rows, tiles.expert_N.shape[0]),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(inputs),
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype),
        input_output_aliases={len(inputs) - 1: 0},
        compiler_params=CompilerParams(num_warps=config.plain_warps, num_stages=config.plain_stages),
        interpret=interpret,
        name="plain_gate_up" if layout.interleaved else "plain_down",
    )(*inputs)
