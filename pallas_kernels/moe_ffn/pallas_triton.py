# SPDX-License-Identifier: Apache-2.0
"""The mixed-precision MoE feed-forward of few tokens: Pallas-Triton kernels that read weight pages in place.

Up to 5 bits no weight is looked up. A LUT of 2^b entries a row makes a product with W_b a sum over codes::

      y_n  =  sum_k LUT[n, k] S_nk             S_nk  =  sum of x_c over the columns c whose code is k

The columns with code k are the ones of a 0/1 matrix that is an AND of bit-planes or their complements; x is cut into
bit-slices (``slices.py``). Then S_nk is a product of 0/1 matrices, 16 slices x 512 bits x 8 rows in two instructions
(``binary_dot.py``), and the work per weight is some 2^b ANDs per 32 of them. Codes are taken 2^4 at a time; at 5 bits
in two turns, one for each value of the first plane. Work doubles with every bit, so the wider bitwidths are looked up
(``look_up.py``). Planes and LUTs come through shared memory (``staged.py``).

A program computes 8 W stored rows of one linear-block, for a pair or for all tokens that selected its expert; each of
its W warps 8 of them. The way of a sum follows from the bitwidth and the block alone: a row's result depends neither on
the other rows of the call nor on how many there are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams, load
from pallas_kernels._triton_inside import limit_registers
from pallas_kernels.bitplane import BlockLayout
from pallas_kernels.moe_ffn.binary_dot import ROWS as WARP_ROWS
from pallas_kernels.moe_ffn.binary_dot import WORDS
from pallas_kernels.moe_ffn.code_sums import Block
from pallas_kernels.moe_ffn.code_sums import dot_rows as dot_rows_by_codes
from pallas_kernels.moe_ffn.look_up import FIELD_BITS, dot_rows, row_blocks
from pallas_kernels.moe_ffn.pages import ACTIVATIONS, WeightPages
from pallas_kernels.moe_ffn.slices import Slices, num_chunks, slice_columns
from pallas_kernels.moe_ffn.staged import Staged, can_stage, declare, is_looped, lut_bytes, stage_luts
from pallas_kernels.tuning import tuned

KERNEL = "moe_ffn"
"""Its name in the table of block sizes."""

SUMMED_BITS = 3, 4, 5
"""Up to which bitwidths codes are summed, each by a part of the kernel of its own: a plane that is not there costs as
much as one that is. Beyond, look-up costs the same for all, where sums double with every bit."""

PAIRS_AT_ONCE = 2
"""That share the look-up of a weight, where tokens share experts."""

APART_TOKENS = 16
"""Up to so many, sums of every pair are a program's: shorter programs end together, and planes come from L2 the second
time. Of more tokens, and of looked up weights, the pairs of one expert share a program."""


@dataclass(frozen=True)
class Config:
    """How a kernel is cut into programs; no result depends on it.

    Attributes:
      num_warps: W of a program, 1 or 2.
      registers: of a thread, at most.
    """

    num_warps: int
    registers: int


def linear_block(
    arena_AW: jax.Array,
    layout: BlockLayout,
    frames_EF: jax.Array,
    bits_EU: jax.Array,
    kind: int,
    ids_P: jax.Array,
    x_XC: jax.Array,
    slices: Slices,
    out: jax.ShapeDtypeStruct,
    finish: Callable[[jax.Array], jax.Array] = lambda y_R: y_R,
    *,
    num_tokens: int,
    config: Config,
    interpret: bool = False,
) -> jax.Array:
    """Returns finish(W x_p) of every pair p, ``out`` [P, rows that ``finish`` leaves]; 0 where its id selects nothing.

    Args:
      arena_AW: uint32 frames.
      layout: of the blocks.
      frames_EF: int32, the blocks' frames.
      bits_EU, kind: bitwidths, and the column of them that belongs to these blocks.
      ids_P: int32, the pairs' experts; an id of E or more selects nothing.
      x_XC: inputs; pair p reads row p // (P / X).
      slices: of the inputs.
      out: shape and dtype of the result.
      finish: from a program's stored rows to what it stores, as many numbers or half as many.
      num_tokens: T that the pairs belong to.
      config: size of a program.
      interpret: runs on any backend, slowly.
    """
    num_pairs = ids_P.shape[0]
    pairs_per_row = num_pairs // slices.unit_X.shape[0]
    num_experts = frames_EF.shape[0]
    num_warps, rows = config.num_warps, WARP_ROWS * config.num_warps
    together = num_tokens > APART_TOKENS
    by_expert = together and num_experts < num_pairs  # a program per expert, else per pair: its expert's first one
    slots, num_blocks = num_experts if by_expert else num_pairs, layout.rows // rows

    def kernel(arena, frames, bits_ref, ids, x, words, unit, out_ref):
        program, slot = pl.program_id(0), pl.program_id(1)
        stage = not interpret and can_stage(layout)
        if stage:
            program = limit_registers(program, config.registers)
            declare(arena, layout, min(layout.max_bits, SUMMED_BITS[-1]), num_warps)
        e = slot if by_expert else ids[slot]
        pair_Z = jnp.arange(pl.next_power_of_2(num_pairs), dtype=jnp.int32)

        def next_pair(after):
            ids_Z = load(ids.at[pair_Z], mask=pair_Z < num_pairs, other=jnp.int32(num_experts))
            return jnp.min(jnp.where((ids_Z == e) & (pair_Z > after), pair_Z, num_pairs))

        def store(pair, index, y_R):
            """The rows that are block ``index`` of so many."""

            @pl.when(pair < num_pairs)
            def _():
                out_ref[pair, pl.ds(index * y_R.shape[0], y_R.shape[0])] = y_R.astype(out_ref.dtype)

        def by_code_sums(block, staged, pairs):
            [pair] = pairs
            x_row = pair // pairs_per_row
            unit_of_x = unit[x_row]  # early: it is there when it is needed
            store(pair, program, finish(dot_rows_by_codes(block, words, x_row, interpret, staged) * unit_of_x))

        def by_look_up(block, field_bits, luts, pairs):
            blocks, block_rows = row_blocks(num_warps, layout.tile_rows)

            def store_rows(row_block, _):
                x_rows = [jnp.minimum(pair, num_pairs - 1) // pairs_per_row for pair in pairs]
                products = dot_rows(block, block_rows, row_block * block_rows, x, x_rows, field_bits, interpret, luts)
                for pair, y_R in zip(pairs, products, strict=True):
                    store(pair, program * blocks + row_block, finish(y_R))

            lax.fori_loop(0, blocks, store_rows, None)

        def run(bits, first):
            """The program's pairs: its own, or those of its expert from the first on."""
            block = partial(Block, layout, num_warps, arena, frames, e, first_row=program * rows)

            def each(at_once, shared, products):
                if not shared:
                    products([slot])
                    return

                def body(pair):
                    pairs = [pair]
                    for _ in range(at_once):  # first of all: ids arrive while planes are multiplied
                        pairs.append(next_pair(pairs[-1]))
                    products(pairs[:-1])
                    return pairs[-1]

                start = first if together else jnp.where(next_pair(-1) == slot, slot, num_pairs)
                lax.while_loop(lambda pair: pair < num_pairs, body, start)

            def sums(least, most):
                summed = block(bits=most if least == most else bits, max_bits=most)
                staged = Staged(summed) if stage else None
                if staged and not staged.looped:
                    staged.request()
                each(1, together, partial(by_code_sums, summed, staged))

            least = layout.min_bits
            for most in SUMMED_BITS:
                if least <= min(layout.max_bits, most):
                    pl.when((bits >= least) & (bits <= most))(partial(sums, least, min(layout.max_bits, most)))
                    least = most + 1

            def looked_up(field_bits):
                wide = block(bits=bits, max_bits=layout.max_bits)
                luts = stage_luts(wide) if stage and lut_bytes(layout, num_warps) else None
                each(PAIRS_AT_ONCE, num_tokens > 1, partial(by_look_up, wide, field_bits, luts))

            for field_bits in FIELD_BITS:
                if least <= min(layout.max_bits, field_bits):
                    pl.when((bits >= least) & (bits <= field_bits))(partial(looked_up, field_bits))
                    least = field_bits + 1

        for start in range(0, num_pairs, slots):
            pair = slot + start  # a store past the last pair is dropped
            selects_nothing = ids[jnp.minimum(pair, num_pairs - 1)] >= num_experts
            pl.when(selects_nothing)(partial(store, pair, program, jnp.zeros(out.shape[1] // num_blocks)))

        if not together:
            pl.when(e < num_experts)(lambda: run(bits_ref[e, kind], slot))
            return
        bits = bits_ref[jnp.minimum(e, num_experts - 1), kind]  # before the pairs are known: fewer waits in a row
        first = next_pair(-1)
        pl.when((first < num_pairs) if by_expert else (first == slot) & (e < num_experts))(lambda: run(bits, first))

    ints = lax.bitcast_convert_type(arena_AW, jnp.int32)  # a view: no copy
    return pl.pallas_call(
        kernel,
        grid=(num_blocks, slots),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 7,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=out,
        compiler_params=CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="gate_up" if layout.interleaved else "down",
    )(ints, frames_EF, bits_EU, ids_P, x_XC, slices.words, slices.unit_X)


def configure(layout: BlockLayout) -> Config:
    """Returns the size of the programs of a block: the table's, or what was fastest for such a block on an H200.

    More registers let a warp ask for more at a time, fewer let more programs run: long rows have enough to ask for.
    """
    heuristic = Config(num_warps=2, registers=168 if is_looped(layout) else 128)
    return Config(**tuned(KERNEL, (layout.rows, layout.columns), vars(heuristic)))


def moe_ffn(
    arena_AW: jax.Array,
    pages: WeightPages,
    m_TD: jax.Array,
    ids_TK: jax.Array,
    activation: str,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns (y_TKD, h_square_TK), float32, as the API defines them, for the few tokens of a decode step.

    Args and errors: see ``pallas_kernels.moe_ffn.api.moe_ffn``.
    """
    ids_P, act = ids_TK.reshape(-1), ACTIVATIONS[activation]

    def gated(y_R):
        gate_R, up_R = (half.reshape(-1) for half in jnp.split(y_R.reshape(-1, 2), 2, axis=1))
        return act(gate_R) * up_R

    def sliced(x_XC, layout):
        return slice_columns(x_XC, layout, num_chunks(layout) * WORDS, interpret=interpret)

    def product(layout, frames_EF, kind, x_XC, slices, out, *finish):
        return linear_block(
            arena_AW, layout, frames_EF, pages.bits_EU, kind, ids_P, x_XC, slices, out, *finish,
            num_tokens=ids_TK.shape[0], config=configure(layout), interpret=interpret,
        )  # fmt: skip

    m = sliced(m_TD, pages.gate_up)
    h_shape = jax.ShapeDtypeStruct((ids_P.size, pages.down.columns), m_TD.dtype)
    h_PF = product(pages.gate_up, pages.gate_up_frames_EF, 0, m_TD, m, h_shape, gated)
    h = sliced(h_PF, pages.down)  # pairs that select nothing are zeros there
    y_shape = jax.ShapeDtypeStruct((ids_P.size, pages.down.rows), jnp.float32)
    y_PD = product(pages.down, pages.down_frames_EF, 1, h_PF, h, y_shape)
    return y_PD.reshape(*ids_TK.shape, -1), h.square_X.reshape(ids_TK.shape)
