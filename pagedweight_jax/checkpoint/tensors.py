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


def read_into(arrays: Iterable[tuple[Path, str, np.ndarray]]) -> None:
    """Fills every array with the bytes of its tensor.

    Args:
      arrays: file, tensor, and an array of its shape and dtype, in C order. The files' headers are valid.

    Raises:
      UserError: a file has been changed since its header was checked.
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

    with ThreadPoolExecutor(READERS) as pool:
        for _ in pool.map(fill, wanted):
            pass


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
