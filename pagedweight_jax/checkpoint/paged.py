# SPDX-License-Identifier: Apache-2.0
"""The paged checkpoint on disk, out and in.

    OUT/manifest.json          what the arrays are: shapes, dtypes, checksums (see manifest.py)
    OUT/files.sha256           checksum of every other file, as ``sha256sum -c files.sha256`` reads them
    OUT/config.json, ...       the model's own configuration, tokenizer and texts
    OUT/arrays/pages/{l}       Orbax: ``pages/{l}/{kind}/{p}`` uint32 [E, page_frames, frame_words] of sparse layer l
    OUT/arrays/dense/{n}       Orbax: ``dense/{dotted path}`` of layer n; ``outer``: embedding, norm, head
    OUT/arrays/calibration     Orbax: sensitivities, importances, coverage, Fisher rows if asked for

A page array holds the exact words that go into the arena, stacked over experts: few large leaves load many times faster
than one leaf per page. They are grouped by layer, so a writer holds one layer (see draft.py) and a reader reads what
it asks for. Nothing is packed (bit-planes do not shrink) and every array has a file of its own, so that a reader gets
its bytes from the disk into the place where they stay, see ``read_plain``.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint.experimental import v1 as ocp

from pagedweight_jax.checkpoint.dense import abstract_dense, named_leaves
from pagedweight_jax.checkpoint.manifest import (
    MANIFEST,
    ArrayInfo,
    PagedManifest,
    array_info,
    from_json,
    page_name,
)
from pagedweight_jax.config import KINDS
from pagedweight_jax.errors import UserError
from pagedweight_jax.models.weights import Weights

ARRAYS = "arrays"
FILES = "files.sha256"

READS_AHEAD = 8
"""Arrays that are read while one is used: one reader alone waits for fresh memory as long as for the disk."""

INDEX_BYTES = 20
"""What Zarr writes behind the one chunk of an array: where it begins, its size, and a checksum of these two."""

ALIGNMENT = 64

Place = tuple[int, int, int]
"""Sparse layer, kind of linear-block, page."""

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, steps done and steps in all."""


def no_progress(stage: str, done: int, total: int) -> None:
    """The ``Progress`` of who does not want to know."""


def group_of(name: str) -> str:
    """The Orbax checkpoint of array ``name``: ``pages/3``, ``dense/3``, ``dense/outer`` or ``calibration``."""
    first, *rest = name.split("/")
    if first == "pages":
        return f"pages/{rest[0]}"
    if first == "dense":
        words = rest[0].split(".")
        return f"dense/{words[1] if words[0] == 'layers' else 'outer'}"
    return first


def read_ahead(read: Callable[[Place], np.ndarray], places: Iterable[Place]) -> Iterator[tuple[Place, np.ndarray]]:
    """Yields every place with what ``read`` returns for it, in order; ``READS_AHEAD`` more are read meanwhile."""
    with ThreadPoolExecutor(READS_AHEAD) as pool:
        under_way = deque()
        for place in places:
            under_way.append((place, pool.submit(read, place)))
            if len(under_way) > READS_AHEAD:
                place, words = under_way.popleft()
                yield place, words.result()
        while under_way:
            place, words = under_way.popleft()
            yield place, words.result()


def partial_folder(out: Path) -> Path:
    """Where the conversion to ``out`` is while it is not finished."""
    return out.with_name(out.name + ".partial")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def plain_files() -> ocp.Context:
    """Returns the Orbax context in which arrays are saved as ``read_plain`` reads them."""
    context = ocp.Context()
    context.array.saving.use_ocdbt = False
    context.array.saving.use_compression = False
    return context


def read_plain(group: Path, name: str, info: ArrayInfo) -> np.ndarray | None:
    """Returns an array straight from its file in an Orbax checkpoint, unverified.

    None if it has no file of its own, or another size than one chunk of plain values with its index behind: then Orbax
    knows better, or what is wrong.
    """
    chunk = "/".join(["c", *"0" * len(info.shape)])
    for file in group.glob(f"*/{name}/{chunk}"):
        if file.stat().st_size == info.nbytes + INDEX_BYTES:
            octets = _aligned_bytes(info.nbytes)
            with file.open("rb") as stream:
                stream.readinto(octets)
            return octets.view(info.dtype).reshape(info.shape)
    return None


def _aligned_bytes(size: int) -> np.ndarray:
    """Returns uint8[size] whose address JAX's CPU backend asks for, to take an array over instead of copying it."""
    octets = np.empty(size + ALIGNMENT, np.uint8)
    start = -octets.ctypes.data % ALIGNMENT
    return octets[start : start + size]


@contextmanager
def quiet_orbax() -> Iterator[None]:
    """Keeps Orbax from printing the tracebacks of errors that it raises as well. May be entered by many threads."""
    logger = logging.getLogger("absl")

    def only_worse(record: logging.LogRecord) -> bool:
        return record.levelno > logging.ERROR

    logger.addFilter(only_worse)
    try:
        yield
    finally:
        logger.removeFilter(only_worse)


def _file_problems(path: Path, hashed: Callable[[str], bool], progress: Progress = no_progress) -> list[str]:
    """One line per file that is missing or, where ``hashed`` picks its name, differs from ``files.sha256``."""
    try:
        lines = (path / FILES).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        return [f"{path / FILES}: cannot be read ({type(error).__name__})"]
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if MANIFEST not in listed:
        return [f"{path / FILES}: does not list {MANIFEST}"]
    problems = []
    for done, (name, digest) in enumerate(listed.items()):
        progress("files", done, len(listed))
        if Path(name).is_absolute() or ".." in Path(name).parts:
            problems.append(f"{path / FILES}: lists {name}, which is not in the folder")
        elif not (path / name).is_file():
            problems.append(f"{path / name}: missing")
        elif hashed(name) and sha256_of(path / name) != digest:
            problems.append(f"{path / name}: damaged or edited, its SHA-256 is not the one in {FILES}")
    return problems


@dataclass(frozen=True)
class PagedCheckpoint:
    """An open paged checkpoint. Nothing is kept in memory: every method reads, verifies and returns.

    Every method raises UserError, naming the array or file, if bytes are missing or not those that were written.
    """

    path: Path
    manifest: PagedManifest

    def _load(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Verified arrays of one group by name."""
        group, infos = self.path / ARRAYS / group_of(names[0]), self.manifest.arrays
        read = {name: read_plain(group, name, infos[name]) for name in names}
        if packed := [name for name in names if read[name] is None]:
            read |= self._load_with_orbax(packed)
        for name in names:
            if array_info(read[name]) != infos[name]:
                why = f"its shape, dtype or checksum is not the one in {MANIFEST}"
                raise UserError(f"{self.path}: array {name} is damaged ({why}); copy or convert it again")
        return read

    def _load_with_orbax(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        group = group_of(names[0])
        tree = {other: ocp.PLACEHOLDER for other in self.manifest.arrays if group_of(other) == group}
        try:
            for name in names:
                info = self.manifest.arrays[name]
                tree[name] = np.empty(info.shape, info.dtype)
            with quiet_orbax():
                read = ocp.load(self.path / ARRAYS / group, tree)
        except Exception as error:  # Orbax and TensorStore raise many kinds; all of them mean bytes that cannot be read
            what = f"array {names[0]}" if len(names) == 1 else f"an array of {group}"
            first_line = str(error).strip().partition("\n")[0][:100]
            why = f"{type(error).__name__}: {first_line}"
            raise UserError(f"{self.path}: {what} is damaged or missing ({why}); copy or convert it again") from error
        return {name: read[name] for name in names}

    def load(self, name: str) -> np.ndarray:
        """Returns one array by its name in the manifest."""
        return self._load([name])[name]

    def load_pages(self, layer: int, kind: int, page: int) -> np.ndarray:
        """Returns page ``page`` of all experts, uint32 [E, page_frames, frame_words], in host memory.

        Args:
          layer: sparse layer, 0 .. L-1.
          kind: GATE_UP or DOWN.
          page: bit-plane, 0 = most significant.
        """
        return self.load(page_name(layer, kind, page))

    def load_dense(self, dtype: str | jnp.dtype | None = None) -> Weights:
        """Returns the weights without routed experts on the default device, cast to ``dtype`` unless it is None."""
        if problems := _file_problems(self.path, lambda name: name.startswith(f"{ARRAYS}/dense/")):
            raise UserError(problems[0])
        abstract = abstract_dense(self.manifest.config)
        names = [f"dense/{name}" for name in named_leaves(abstract)]
        leaves = {}
        for _, group in groupby(sorted(names, key=group_of), group_of):  # on the host one layer at a time
            leaves |= {name: jnp.asarray(array, dtype) for name, array in self._load(list(group)).items()}
        return jax.tree.unflatten(jax.tree.structure(abstract), [leaves[name] for name in names])

    @property
    def sensitivity(self) -> np.ndarray:
        """s of eq. 2, float64 [L, E, U, Q] for bitwidths min_bits .. max_bits."""
        return self.load("calibration/sensitivity")

    @property
    def tokens(self) -> np.ndarray:
        """Calibration tokens routed to each expert, int64 [L, E]."""
        return self.load("calibration/tokens")

    @property
    def uncalibrated(self) -> np.ndarray:
        """True where an expert took its layer's average importance, bool [L, E]."""
        return self.load("calibration/uncalibrated")

    def importance(self, kind: int) -> np.ndarray:
        """h of eq. 2, the importance of the columns of a linear-block kind, float32 [L, E, C]."""
        return self.load(f"calibration/importance/{KINDS[kind]}")

    def fisher(self, kind: int) -> np.ndarray | None:
        """The squared gradients of a linear-block kind's rows, float32 [L, E, N]; None if the choice was without."""
        name = f"calibration/fisher/{KINDS[kind]}"
        return self.load(name) if name in self.manifest.arrays else None


def _open(path: Path) -> PagedCheckpoint:
    path = Path(path).absolute()
    if not path.is_dir():
        partial = partial_folder(path)
        hint = f" ({partial.name} is of a conversion that did not finish)" if partial.exists() else ""
        raise UserError(f"{path}: no such folder{hint}")
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path}: no {MANIFEST}, so not a finished paged checkpoint (pagedweight convert)") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path / MANIFEST}: cannot be read ({type(error).__name__})") from error
    try:
        manifest = from_json(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return PagedCheckpoint(path, manifest)


def open_checkpoint(path: Path) -> PagedCheckpoint:
    """Returns the checkpoint at ``path``: its manifest and files are verified now, the arrays when they are read.

    Raises:
      UserError: no finished checkpoint there, another format or version, or a file that is not what was written.
    """
    checkpoint = _open(path)
    if problems := _file_problems(checkpoint.path, lambda name: not name.startswith(f"{ARRAYS}/")):
        raise UserError(problems[0])
    return checkpoint


def verify(path: Path, progress: Progress = no_progress) -> list[str]:
    """Returns one line for each file and array that is not what was written; empty when all are.

    Args:
      path: a paged checkpoint.
      progress: see ``Progress``.

    Raises:
      UserError: there is no manifest to hold the rest to.
    """
    checkpoint = _open(path)
    problems = _file_problems(checkpoint.path, lambda name: True, progress)
    for done, name in enumerate(checkpoint.manifest.arrays):
        progress("arrays", done, len(checkpoint.manifest.arrays))
        try:
            checkpoint.load(name)
        except UserError as error:
            problems.append(str(error))
    return problems
