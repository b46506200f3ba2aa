# SPDX-License-Identifier: Apache-2.0
"""Tensors of safetensors files, read straight into the arrays where they belong, several at once.

The library's own reader copies every tensor twice, one at a time. A file is eight bytes (the header's length, little
endian), the header (JSON: a tensor's dtype, shape and place behind the header, by its name) and the tensors' bytes.
"""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pagedweight_jax.errors import UserError

READERS = 8

CHECKED_VALUES = 1 << 20
"""Values that are checked at once: what that takes besides stays small."""


def read_into(arrays: Iterable[tuple[Path, str, np.ndarray]]) -> None:
    """Fills every array with the values of its tensor, all of them finite.

    Args:
      arrays: file, tensor, and an array of its shape and dtype (float32, float16 or bfloat16), in C order. The files'
        headers are valid.

    Raises:
      UserError: a value is NaN or infinite, or a file has been changed since its header was checked.
    """
    wanted = list(arrays)
    places = {path: _places(path) for path in {path for path, _, _ in wanted}}

    def fill(one: tuple[Path, str, np.ndarray]) -> None:
        path, name, array = one
        start, stop = places[path].get(name, (0, 0))
        octets = array.reshape(-1).view(np.uint8)
        with path.open("rb") as file:
            file.seek(start)
            if stop - start != octets.size or file.readinto(octets) != octets.size:
                raise UserError(f"{path}: tensor {name} is cut short or has changed while it was read")
        if (place := _first_not_finite(array)) is not None:
            raise UserError(f"{path}: tensor {name}{_named(place)} has a weight that is NaN or infinite")

    with ThreadPoolExecutor(READERS) as pool:
        for _ in pool.map(fill, wanted):
            pass


def _first_not_finite(array: np.ndarray) -> tuple[int, ...] | None:
    """Returns the index of the first NaN or infinity, None if there is none. By the exponent's bits: numpy has no
    fast test for bfloat16."""
    unsigned = np.dtype(f"u{array.itemsize}")
    exponent = np.asarray(np.inf, array.dtype).view(unsigned)
    flat = array.reshape(-1).view(unsigned)
    for start in range(0, flat.size, CHECKED_VALUES):
        bad = (flat[start : start + CHECKED_VALUES] & exponent) == exponent
        if bad.any():
            return tuple(map(int, np.unravel_index(start + bad.argmax(), array.shape)))
    return None


def _named(place: tuple[int, ...]) -> str:
    """Expert and row of a value's place in [E, N, C], row in [N, C], nothing in [N]."""
    words = ("expert", "row")[-len(place[:-1]) :] if len(place) > 1 else ()
    return "".join(f", {word} {index}" for word, index in zip(words, place))


def _places(path: Path) -> dict[str, tuple[int, int]]:
    """Returns where the tensors' bytes begin and end in the file, by name."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    base = 8 + header_bytes
    return {
        name: (base + entry["data_offsets"][0], base + entry["data_offsets"][1])
        for name, entry in header.items()
        if name != "__metadata__"
    }
