# SPDX-License-Identifier: Apache-2.0
"""The hidden states of all calibration tokens between two layers: one file for what enters a layer.

Gradients by the hidden states are kept in the same way.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagedweight_jax.checkpoint.draft import sync
from pagedweight_jax.errors import UserError


@dataclass(frozen=True)
class HiddenStates:
    """Files of hidden states.

    Attributes:
      folder: where they lie; ``{layer}.{suffix}`` holds what enters a layer.
      shape_NSD: of each: N sequences of S tokens.
      dtype: of each.
      ram_bytes: files up to this size are read into memory, larger ones are mapped.
      suffix: what kind of states they are.
    """

    folder: Path
    shape_NSD: tuple[int, int, int]
    dtype: np.dtype
    ram_bytes: int
    suffix: str = "hidden"

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape_NSD, dtype=np.int64)) * self.dtype.itemsize

    def _path(self, layer: int) -> Path:
        return self.folder / f"{layer}.{self.suffix}"

    def read(self, layer: int) -> np.ndarray:
        """Returns what enters ``layer``, [N, S, D].

        Raises:
          UserError: its file is not there, or not whole.
        """
        path = self._path(layer)
        if not path.is_file() or path.stat().st_size != self.nbytes:
            raise UserError(f"{path}: missing or cut short; remove {self.folder.parent.name} to start anew")
        if self.nbytes > self.ram_bytes:
            return np.memmap(path, self.dtype, "r", shape=self.shape_NSD)
        return np.fromfile(path, self.dtype).reshape(self.shape_NSD)

    @contextmanager
    def write(self, layer: int) -> Iterator[Callable[[np.ndarray], None]]:
        """Yields a function that takes what enters ``layer``, batch by batch; at the end it is all on the disk."""
        # Not through a map: on a full disk a write raises, a map kills the process.
        with self._path(layer).open("wb") as file:
            yield lambda x_BSD: file.write(np.ascontiguousarray(x_BSD, self.dtype).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        sync(self.folder)

    def drop(self, layer: int) -> None:
        """Removes what enters ``layer``, if it is there."""
        self._path(layer).unlink(missing_ok=True)

    def drop_before(self, layer: int) -> None:
        """Removes what entered earlier layers."""
        for path in self.folder.glob(f"*.{self.suffix}"):
            if int(path.stem) < layer:
                path.unlink()
