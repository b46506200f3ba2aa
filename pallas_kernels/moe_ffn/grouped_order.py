# SPDX-License-Identifier: Apache-2.0
"""In which order the grouped products take pairs, columns and rows.

Pairs p = t K + k are sorted by expert; an expert's pairs are cut into tiles of a fixed number of slots, the last of
them partly empty. Shapes do not depend on the routing: there are as many tiles as the worst one needs.

Columns and rows are taken such that a thread multiplies the very weights whose words it has loaded. The tensor core
instruction wants of thread 4 g + q of warp v of its first operand

      rows    16 v + g  and  16 v + g + 8        columns    8 i + 2 q  and  8 i + 2 q + 1

so a chunk is 4 words of a row, one for each q, and its 128 columns are, for i = 4 s + n::

      position  =  128 chunk + 8 i + 2 q + half          bit j = s + 4 (2 n + half) of word q of the chunk

Bands of 4 words and more give whole chunks; the narrow ones share the last chunk, with positions that hold no column.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import CompilerParams, load, store
from pallas_kernels.bitplane import BlockLayout

WORDS = 4
"""Words of a chunk."""

CHUNK = 32 * WORDS
"""Columns of a chunk."""

SORT_WARPS = 8
SORT_BLOCK, TILE_BLOCK = 4096, 128
"""Pairs that a sorting program looks at together, and tiles that it writes."""

ORDER_WARPS = 4
"""Of a program that puts a row's columns in order."""


def whole_chunks(layout: BlockLayout) -> int:
    """Returns how many chunks the bands of 4 words and more have."""
    return sum(tiles * width // WORDS for width, tiles in layout.bands if width >= WORDS)


def narrow_bands(layout: BlockLayout) -> list[tuple[int, int]]:
    """Returns (band, first word in the last chunk) of the bands of fewer than 4 words; each has one tile."""
    found, word = [], 0
    for band, (width, _) in enumerate(layout.bands):
        if width < WORDS:
            found.append((band, word))
            word += width
    return found


def num_chunks(layout: BlockLayout) -> int:
    return whole_chunks(layout) + bool(narrow_bands(layout))


def order_columns(x_XC: jax.Array | np.ndarray, layout: BlockLayout, fill=0) -> jax.Array | np.ndarray:
    """Returns the rows' columns by position, [X, 128 chunks]; ``fill`` where a position holds none."""
    xp, rows = np if isinstance(x_XC, np.ndarray) else jnp, x_XC.shape[0]
    parts, column = [], 0
    for width, tiles in layout.bands:
        end = column + 32 * width * tiles
        parts.append(x_XC[:, column:end].reshape(rows, tiles, 32, width).swapaxes(2, 3).reshape(rows, -1, 32))
        column = end
    empty = num_chunks(layout) * WORDS - column // 32
    x_XWJ = xp.pad(xp.concatenate(parts, axis=1), ((0, 0), (0, empty), (0, 0)), constant_values=fill)
    x = x_XWJ.reshape(rows, -1, WORDS, 4, 2, 4)  # chunk, q, n, half, s
    return x.transpose(0, 1, 5, 3, 2, 4).reshape(rows, -1)


def order_inputs(x_XC: jax.Array, layout: BlockLayout, interpret: bool = False) -> jax.Array:
    """Returns ``order_columns`` of token rows, by a kernel where no chunk is shared: XLA's transposition is slow."""
    if narrow_bands(layout):
        return order_columns(x_XC, layout)

    def kernel(x, out):
        row, first = pl.program_id(0), 0
        for width, tiles in layout.bands:
            for _ in range(tiles):
                column_C = first + jnp.arange(32 * width, dtype=jnp.int32)
                x_C = x[row, column_C].reshape(4, 2, 4, width // WORDS, WORDS)  # n, half, s, chunk, q
                out[row, column_C] = x_C.transpose(3, 2, 0, 4, 1).reshape(-1)
                first += 32 * width

    any_space = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        grid=(x_XC.shape[0],),
        in_specs=[any_space],
        out_specs=any_space,
        out_shape=jax.ShapeDtypeStruct(x_XC.shape, x_XC.dtype),
        compiler_params=CompilerParams(num_warps=ORDER_WARPS, num_stages=1),
        interpret=interpret,
        name="order_inputs",
    )(x_XC)


def loaded_rows(num_rows: int, num_warps: int) -> jax.Array:
    """Returns which of a program's R rows is loaded as r-th, int32[R]: thread 4 g + q of warp v loads row 8 v + g."""
    warps = min(num_warps, num_rows // 16)
    r = jnp.arange(num_rows, dtype=jnp.int32)
    g, warp, repeat = r & 7, (r >> 3) & (warps - 1), r // (8 * warps)
    return g + 8 * (repeat & 1) + 16 * (warp + warps * (repeat >> 1))


def order_weights(w: jax.Array, num_warps: int) -> jax.Array:
    """Returns [R, 128], rows in their order and columns by position, from [R, 4, 4, .., 2]: row loaded as r-th, q, i.

    Moves nothing between threads if r-th row and q are where ``loaded_rows`` says.
    """
    num_rows, inner = w.shape[0], w.shape[2:]
    warps = min(num_warps, num_rows // 16)
    w = w.reshape(num_rows // (16 * warps), 2, warps, 8, WORDS, *inner)
    i_axes = range(5, 4 + len(inner))
    return w.transpose(0, 2, 1, 3, *i_axes, 4, w.ndim - 1).reshape(num_rows, CHUNK)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """Pairs by expert.

    Attributes:
      pairs_P: int32, the used pairs, those of an expert together and in their order; what follows them is undefined.
      expert_N: int32, each tile's expert, E where there is no tile: between and behind the experts' there are such.
      first_N, count_N: int32, where the tile begins in ``pairs_P``, and how many pairs it holds.
      count_E: int32, how many pairs each expert has.
    """

    pairs_P: jax.Array
    expert_N: jax.Array
    first_N: jax.Array
    count_N: jax.Array
    count_E: jax.Array


def make_tiles(ids_P: jax.Array, num_experts: int, tile: int, interpret: bool = False) -> Tiles:
    """Returns the tiles of ``tile`` slots each; pairs with an id of E or more are in none.

    One program per expert counts the pairs of those before it, ranks its own and cuts them into tiles. Those begin at
    tile (pairs before it) // ``tile`` + e: there is room for the tiles of the experts before, and nobody counts them.
    """
    num_pairs = ids_P.shape[0]
    num_tiles = num_pairs // tile + num_experts
    block = min(pl.next_power_of_2(num_pairs), SORT_BLOCK)

    def kernel(ids, pairs, experts, firsts, counts, count_of):
        e = pl.program_id(0)

        def read(i):
            pair_Z = i * block + jnp.arange(block, dtype=jnp.int32)
            return pair_Z, load(ids.at[pair_Z], mask=pair_Z < num_pairs, other=jnp.int32(num_experts))

        def count_before(i, before):
            return before + jnp.sum((read(i)[1] < e).astype(jnp.int32))

        def rank(i, end):
            pair_Z, ids_Z = read(i)
            mine_Z = ids_Z == e
            rank_Z = jnp.cumsum(mine_Z.astype(jnp.int32))
            place_Z = jnp.where(mine_Z, end + rank_Z - 1, num_pairs + pair_Z)  # masked ones are past the end
            store(pairs.at[place_Z], pair_Z, mask=mine_Z)
            return end + jnp.max(rank_Z)

        blocks = pl.cdiv(num_pairs, block)
        start = lax.fori_loop(0, blocks, count_before, jnp.int32(0))
        end = lax.fori_loop(0, blocks, rank, start)
        count_of[e] = end - start
        first_tile = lax.div(start, jnp.int32(tile)) + e
        end_tile = jnp.where(e < num_experts - 1, lax.div(end, jnp.int32(tile)) + e + 1, num_tiles)

        def cut(i, _):
            slot_Z = i * TILE_BLOCK + jnp.arange(TILE_BLOCK, dtype=jnp.int32)
            first_Z, inside_Z = start + slot_Z * tile, first_tile + slot_Z < end_tile
            place_Z = jnp.where(inside_Z, first_tile + slot_Z, num_tiles + slot_Z)
            store(experts.at[place_Z], jnp.where(first_Z < end, e, num_experts), mask=inside_Z)
            store(firsts.at[place_Z], first_Z, mask=inside_Z)
            store(counts.at[place_Z], jnp.clip(end - first_Z, 0, tile), mask=inside_Z)

        lax.fori_loop(0, lax.div(end_tile - first_tile + TILE_BLOCK - 1, jnp.int32(TILE_BLOCK)), cut, None)

    any_space = pl.BlockSpec(memory_space=pl.ANY)
    sizes = num_pairs, num_tiles, num_tiles, num_tiles, num_experts
    arrays = pl.pallas_call(
        kernel,
        grid=(num_experts,),
        in_specs=[any_space],
        out_specs=[any_space] * len(sizes),
        out_shape=[jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes],
        compiler_params=CompilerParams(num_warps=SORT_WARPS, num_stages=1),
        interpret=interpret,
        name="make_tiles",
    )(ids_P)
    return Tiles(*arrays)
