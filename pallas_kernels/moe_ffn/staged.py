# SPDX-License-Identifier: Apache-2.0
"""A program's rows on their way through shared memory, each warp's own: what ``code_sums`` multiplies, on a GPU.

A load into registers needs room in the L1 cache until it is there, of which XLA leaves a kernel 23 KB, and asks for the
64 bytes of each of eight rows that are one chunk. Here whole tiles are copied, which are one stretch of memory, past L1
(``cp.async``). Neither Pallas nor Triton has such copies, nor shared memory that is read in another order than it is
written in, so all of this is PTX::

      shared memory of a warp    |  planes b - max_bits .. b - 1: their tiles, 8 rows each  |  LUTs of 8 rows  |

Rows longer than a few chunks are copied tile by tile; there are two buffers of planes then, and a register of the
thread, ``pw_at``, says which is read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton_inside import asm_at, asm_like
from pallas_kernels.bitplane import BlockLayout
from pallas_kernels.moe_ffn.binary_dot import ROWS, WORDS
from pallas_kernels.moe_ffn.code_sums import Block, add_chunk
from pallas_kernels.moe_ffn.slices import Run, num_chunks, runs

MOST_UNROLLED = 6
"""Chunks of a row that are copied at once."""

VECTOR = {1: ".b32 {}", 2: ".v2.b32 {{{}, {}}}", 4: ".v4.b32 {{{}, {}, {}, {}}}"}
"""Loads of so many words."""

THREAD = (
    ".reg .b32 warp, lane, at; mov.u32 warp, %tid.x; and.b32 lane, warp, 31; shr.u32 warp, warp, 5; "
    "mov.u32 at, pw_stage; mad.lo.u32 at, warp, {size}, at; "
)
"""Where a warp's shared memory begins."""


def can_stage(layout: BlockLayout) -> bool:
    """Whether rows of this layout can pass through shared memory."""
    return num_chunks(layout) <= MOST_UNROLLED or is_looped(layout)


def is_looped(layout: BlockLayout) -> bool:
    """Whether a row is so long that its tiles, all of one size, are copied one after another."""
    return num_chunks(layout) > MOST_UNROLLED and len(layout.bands) == 1 and layout.tile_words > WORDS


@dataclass(frozen=True)
class Stage:
    """How a warp's shared memory is cut, in bytes.

    Attributes:
      layout, planes: of the rows, and how many planes of them.
    """

    layout: BlockLayout
    planes: int

    @property
    def plane(self) -> int:
        return 4 * ROWS * (self.layout.tile_words if is_looped(self.layout) else self.layout.columns // 32)

    @property
    def buffer(self) -> int:
        return self.planes * self.plane

    @property
    def luts(self) -> int:
        """Where they begin."""
        return self.buffer * (2 if is_looped(self.layout) else 1)

    @property
    def size(self) -> int:
        return self.luts + 2 * ROWS * 2**self.planes

    @property
    def tiles(self) -> list[tuple[Run, int, int]]:
        """(run, tile, where it begins in its plane)."""
        found, start = [], 0
        for run in runs(self.layout):
            for tile in range(self.layout.bands[run.band][1]):
                found.append((run, tile, start))
                start += 0 if is_looped(self.layout) else 4 * ROWS * run.tile_words
        return found


def lut_bytes(layout: BlockLayout, num_warps: int) -> int:
    """Returns the bytes of the widest LUTs of a program's rows, or 0 if they can lie in several frames."""
    size = ROWS * num_warps * 2 ** (layout.max_bits + 1)
    return size if layout.tile_rows * 2**layout.max_bits <= 2 * layout.frame_words else 0


def declare(arena, layout: BlockLayout, planes: int, num_warps: int) -> None:
    """Sets a program's shared memory aside, once, for at most so many planes or one row's widest LUT."""
    zero = jnp.zeros(1, jnp.int32)
    size = max(num_warps * Stage(layout, planes).size, lut_bytes(layout, num_warps))
    asm_at(arena.at[zero, zero], f".shared .align 128 .b8 pw_stage[{size}]; .reg .b32 pw_at; mov.b32 pw_at, 0;")


@dataclass(frozen=True)
class Staged:
    """The rows of ``block`` in shared memory."""

    block: Block

    @property
    def stage(self) -> Stage:
        return Stage(self.block.layout, self.block.max_bits)

    @property
    def looped(self) -> bool:
        return is_looped(self.block.layout)

    @property
    def has_lut(self) -> bool:
        """Whether the rows' LUTs are there as well: if all of a tile's lie in one frame, and their size is known."""
        layout, bits = self.block.layout, self.block.bits
        return isinstance(bits, int) and layout.tile_rows * 2**bits <= 2 * layout.frame_words

    def run(self, text: str) -> None:
        zero = jnp.zeros(1, jnp.int32)
        asm_at(self.block.arena.at[zero, zero], text)

    def copy(self, place, start: int, part: int, row_bytes: int = 0, ahead: jax.Array | None = None) -> None:
        """Asks for ``part`` bytes a warp, 16 a thread at a time.

        The 64 byte halves of each 128 change places in odd rows: then those who read the same columns of two rows meet
        in no bank.

        Args:
          place: (frame, word in it) of the first warp's; the others' follow.
          start: where they go, from where the warp's memory begins.
          row_bytes: of a row of a tile.
          ahead: if given they go to the buffer that is not read, and only where it is not zero.
        """
        text = "{ .reg .b32 from, to; .reg .b64 source; .reg .pred mine; " + THREAD.format(size=self.stage.size)
        text += f"shl.b32 lane, lane, 4; mad.lo.u32 from, warp, {part}, lane; cvt.u64.u32 source, from; "
        text += f"add.u64 source, source, $1; setp.lt.u32 mine, lane, {part}; "
        if row_bytes >= 128:
            text += f"and.b32 to, lane, {row_bytes}; shr.u32 to, to, {(row_bytes // 64).bit_length() - 1}; "
            text += "xor.b32 to, to, lane; add.u32 at, at, to; "
        else:
            text += "add.u32 at, at, lane; "
        if ahead is not None:
            text += f"xor.b32 to, pw_at, {self.stage.buffer}; add.u32 at, at, to; setp.ne.and.s32 mine, $2, 0, mine; "
        for i in range(0, max(part, 512), 512):
            text += f"@mine cp.async.cg.shared.global [at+{start + i}], [source+{i}], 16; "
        frame, word = place
        value = None if ahead is None else ahead.astype(jnp.int32)[None]
        asm_at(self.block.arena.at[frame[None], word[None]], text + "}", value)

    def copy_tile(self, run: Run, places: list, start: int = 0, ahead: jax.Array | None = None) -> None:
        for i, place in enumerate(places):
            self.copy(place, start + i * self.stage.plane, 4 * ROWS * run.tile_words, 4 * run.tile_words, ahead)

    def request(self) -> None:
        """Asks for the rows' LUTs, and for all their words or those of the first tile."""
        block, tiles = self.block, self.stage.tiles[:1] if self.looped else self.stage.tiles
        asked = [(run, block.tile_places(run, tile), start) for run, tile, start in tiles]
        lut = block.lut_place(block.first_row) if self.has_lut else None
        self.run("bar.warp.sync 0xffffffff; mov.b32 pw_at, 0;")
        for run, places, start in asked:
            self.copy_tile(run, places, start)
        if lut:
            self.copy(lut, self.stage.luts, 2 * ROWS * 2**block.bits)
        self.run("cp.async.commit_group;")

    def wait(self) -> None:
        self.run("cp.async.wait_all; bar.warp.sync 0xffffffff;")

    def words(self, chunk: int, like: jax.Array) -> list[jax.Array]:
        """Returns what ``Block.words`` does, laid out like a block of ``load_slices``."""
        found = []
        for i, (_, there) in enumerate(self.block.planes):
            text = "{ .reg .b32 q, row; .reg .pred mine; " + THREAD.format(size=self.stage.size)
            text += "add.u32 at, at, pw_at; and.b32 q, lane, 3; shr.u32 lane, lane, 2; "
            text += " ".join(f"mov.b32 ${register}, 0;" for register in range(4))
            for run, tile, start in self.stage.tiles:
                if not run.chunk <= chunk < run.chunk + run.chunks or run.tile_and_word(chunk)[0] != tile:
                    continue
                word = run.tile_and_word(chunk)[1]
                start += i * self.stage.plane
                text += f" shl.b32 row, q, 4; mad.lo.u32 row, lane, {4 * run.tile_words}, row; "
                if run.width == WORDS:
                    text += f"add.u32 row, row, {4 * word}; "
                    if run.tile_words >= 32:
                        text += "and.b32 q, lane, 1; shl.b32 q, q, 6; xor.b32 row, row, q; "
                    text += f"add.u32 row, row, at; ld.shared.v4.b32 {{$0, $1, $2, $3}}, [row+{start}];"
                else:
                    first, end = run.position // 4, -(-(run.position + run.width) // 4)
                    mine = [f"${run.position % 4 + register}" for register in range(min(run.width, 4))]
                    text += f"setp.ge.u32 mine, q, {first}; setp.lt.and.u32 mine, q, {end}, mine; "
                    text += f"add.u32 row, row, at; @mine ld.shared{VECTOR[len(mine)].format(*mine)}, "
                    text += f"[row+{start - 16 * first}];"
            [words_VK] = asm_like(like, text + " }", pack=4)
            found.append(words_VK if there is None else jnp.where(there, words_VK, 0))
        return found

    def lut(self, turn, rows_VQ: jax.Array) -> list[jax.Array]:
        """Returns what ``Block.lut`` does for some of the program's rows."""
        block, pairs = self.block, 2 ** (self.block.inner - 1)
        in_warp_VQ = ((rows_VQ & (ROWS - 1)) << (block.bits + 1)) + 4 * pairs * turn
        at_VQ = (rows_VQ // ROWS) * self.stage.size + in_warp_VQ
        text = f"{{ .reg .b32 at; mov.u32 at, pw_stage; add.u32 at, at, ${pairs};"
        for i in range(0, pairs, 4):
            registers = ", ".join(f"${i + j}" for j in range(4))
            text += f" ld.shared.v4.b32 {{{registers}}}, [at+{self.stage.luts + 4 * i}];"
        return asm_like(at_VQ, text + " }", results=pairs)

    def add_tiles(self, turn, sums: list, load_slices: Callable) -> list:
        """Returns the sums with those of all tiles added (``add_chunk``): one is copied while another is multiplied."""
        block, [run] = self.block, runs(self.block.layout)
        per_tile, tiles = run.tile_words // WORDS, self.block.layout.bands[0][1]

        def add_tile(tile, carry):
            sums, places = carry
            self.run("bar.warp.sync 0xffffffff;")  # nobody reads any more what is copied over
            self.copy_tile(run, places, ahead=tile + 1 < tiles)
            self.run("cp.async.commit_group;")
            places = block.tile_places(run, jnp.minimum(tile + 2, tiles - 1))
            slices = [load_slices(tile * per_tile + chunk) for chunk in range(per_tile)]
            self.run("cp.async.wait_group 1; bar.warp.sync 0xffffffff;")
            for chunk in range(per_tile):
                sums = add_chunk(block, turn, self.words(chunk, slices[chunk][0]), slices[chunk], sums, False)
            self.run(f"xor.b32 pw_at, pw_at, {self.stage.buffer};")
            return sums, places

        self.request()
        return lax.fori_loop(0, tiles, add_tile, (sums, block.tile_places(run, jnp.int32(min(1, tiles - 1)))))[0]


def stage_luts(block: Block) -> jax.Array:
    """Copies the LUTs of the program's rows into shared memory; returns where they begin there, int32[1, 1]."""
    frame, word = block.lut_place(block.first_row)
    threads, size = 32 * block.num_warps, jnp.left_shift(2 * ROWS * block.num_warps, block.bits)
    text = "{ .reg .b32 mine, to; .reg .b64 source; .reg .pred more; mov.u32 mine, %tid.x; shl.b32 mine, mine, 4; "
    text += "cvt.u64.u32 source, mine; add.u64 source, source, $1; mov.u32 to, pw_stage; add.u32 to, to, mine; "
    for i in range(0, lut_bytes(block.layout, block.num_warps), 16 * threads):
        text += f"setp.lt.u32 more, mine, $2; add.u32 mine, mine, {16 * threads}; "
        text += f"@more cp.async.cg.shared.global [to+{i}], [source+{i}], 16; "
    asm_at(block.arena.at[frame[None], word[None]], text + "cp.async.wait_all; bar.sync 0; }", size[None])
    [start] = asm_like(jnp.zeros((1, 1), jnp.int32), "mov.u32 $0, pw_stage;")
    return start


def look_up(at: jax.Array) -> jax.Array:
    """Returns float32: the centroids at these addresses of shared memory."""
    text = "{ .reg .b16 half; ld.shared.b16 half, [$1]; cvt.f32.f16 $0, half; }"
    return asm_like(at, text, dtype=jnp.float32)[0]
