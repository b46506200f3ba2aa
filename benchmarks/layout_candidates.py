# SPDX-License-Identifier: Apache-2.0
"""The plane layouts that ``layout.py`` compares: ``BlockLayout`` and what was thought of beside it."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from lookup_kernel import Config

from pallas_kernels.bitplane import BlockLayout
from pallas_kernels.moe_ffn.arg_specs import MoESpec


@dataclass(frozen=True)
class Candidate(BlockLayout):
    """A layout that can differ from ``BlockLayout``.

    Attributes:
      max_rows, max_words: bounds of R and T.
      equal: tiles of one width, the largest power of two that divides C/32, instead of bands.
      order: gate and up rows in ``turns``; R/2 gate rows then R/2 up rows in a tile (``halves``); all gate rows, then
        all up rows (``apart``: the product of the two is left to XLA).
    """

    max_rows: int = 16
    max_words: int = 64
    equal: bool = False
    order: str = "turns"

    @cached_property
    def tile_rows(self):
        return min(self.rows & -self.rows, self.max_rows)

    @cached_property
    def bands(self):
        words = self.columns // 32
        if self.equal:
            width = min(words & -words, self.max_words)
            return ((width, words // width),)
        widths = [self.max_words >> i for i in range(self.max_words.bit_length())]
        counts = [words // widths[0]] + [words % widths[0] // width % 2 for width in widths[1:]]
        return tuple((width, count) for width, count in zip(widths, counts, strict=True) if count)

    @cached_property
    def stored_rows(self):
        source = np.arange(self.rows)
        if not self.interleaved or self.order == "apart":
            return source
        run = 1 if self.order == "turns" else self.tile_rows // 2
        return source.reshape(2, -1, run).swapaxes(0, 1).reshape(-1)


VARIANTS = {
    "bands 64, R 16": ({}, [(8, 2), (8, 4), (16, 4)]),
    "equal tiles, R 16": ({"equal": True}, [(16, 1), (16, 2)]),
    "equal tiles, R 64": ({"equal": True, "max_rows": 64}, [(32, 2), (64, 4)]),
    "bands 32": ({"max_words": 32}, [(8, 4), (16, 4)]),
    "bands 16": ({"max_words": 16}, [(8, 4), (16, 4)]),
    "apart": ({"order": "apart"}, [(8, 4), (16, 4)]),
    "halves": ({"order": "halves"}, [(16, 4)]),
    "R 8": ({"max_rows": 8}, [(8, 4)]),
    "R 32": ({"max_rows": 32}, [(32, 8)]),
    "other frame": ({"frame_words": None}, [(8, 4)]),
}
"""What differs from ``BlockLayout``, and the program sizes to try: (rows, warps)."""


@dataclass(frozen=True)
class Case:
    """One kernel to time: ``what`` is a block, or one of the ceilings "empty" and "planes"."""

    spec: MoESpec
    kind: int
    variant: str
    layout: Candidate
    config: Config
    tokens: int = 1
    what: str = "block"

    @property
    def name(self) -> str:
        block = ("gate_up", "down")[self.kind]
        program = f"{self.config.rows}x{self.config.num_warps}"
        return f"{self.spec.name} {block} {self.variant} {self.what} {program} T{self.tokens}"

    @property
    def columns_out(self) -> int:
        return self.layout.rows // 2 if self.layout.interleaved and self.layout.order != "apart" else self.layout.rows


def cases(specs: list[MoESpec]) -> list[Case]:
    """Returns every case, the most telling first."""
    found = []
    for variant, (changes, sizes) in VARIANTS.items():
        for spec in specs:
            for kind, base in enumerate(spec.layouts):
                fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(BlockLayout)}
                layout = Candidate(**fields)
                if ("order" in changes and kind) or ("equal" in changes and len(layout.bands) == 1):
                    continue  # the same as another variant
                if "frame_words" in changes:
                    other = base.frame_words // 2 if base.frame_words > 2048 else 2 * base.frame_words
                    layout = Candidate(**fields | {"frame_words": other})
                elif changes:
                    layout = Candidate(**fields | changes)
                found += [
                    Case(spec, kind, variant, layout, Config(rows=rows, num_warps=num_warps))
                    for rows, num_warps in sizes
                    if rows <= layout.tile_rows
                ]
                if not changes:
                    config = Config(rows=8, num_warps=4)
                    found.append(Case(spec, kind, variant, layout, config, tokens=8))
                    found += [Case(spec, kind, variant, layout, config, what=what) for what in ("empty", "planes")]
    return found
