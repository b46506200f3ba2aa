# SPDX-License-Identifier: Apache-2.0
"""The paged checkpoint on disk, out and in.

    OUT/manifest.json          what the arrays are: shapes, dtypes, checksums (see manifest.py)
    OUT/files.sha256           checksum of every other file, as ``sha256sum -c files.sha256`` reads them
    OUT/config.json, ...       the model's own configuration, tokenizer and texts
    OUT/arrays/pages/{l}       Orbax: ``pages/{l}/{kind}/{p}`` uint32 [E, page_frames, frame_words] of sparse layer l
    OUT/arrays/dense           Orbax: ``dense/{dotted path}`` of every weight but the routed experts
    OUT/arrays/calibration     Orbax: sensitivities, importances, coverage

A page array holds the exact words that go into the arena, stacked over experts: few large leaves load many times faster
than one leaf per page. Pages are grouped by layer, so a writer holds one layer and a reader reads what it asks for.

All is written to ``OUT.partial`` and renamed at the end; the manifest is the last file written.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint.experimental import v1 as ocp

from pagedweight_jax.checkpoint.dense import abstract_dense, named_leaves
from pagedweight_jax.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    PagedManifest,
    array_info,
    check_arrays,
    from_json,
    page_name,
    to_json,
)
from pagedweight_jax.config import KINDS
from pagedweight_jax.errors import UserError
from pagedweight_jax.models.weights import Weights

ARRAYS = "arrays"
FILES = "files.sha256"

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, steps done and steps in all."""


def no_progress(stage: str, done: int, total: int) -> None:
    """The ``Progress`` of who does not want to know."""


def _group(name: str) -> str:
    """The Orbax checkpoint that array ``name`` lies in: one per sparse layer's pages, one per other first word."""
    words = name.split("/")
    return "/".join(words[: 2 if words[0] == "pages" else 1])


def _partial(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def nearest_folder(out: Path) -> Path:
    """Returns the nearest folder above ``out`` that exists."""
    return next(parent for parent in Path(out).absolute().parents if parent.exists())


def check_output(out: Path, overwrite: bool) -> None:
    """Raises UserError if ``out`` cannot be written, or must not be: it exists and is not to be overwritten."""
    parent = nearest_folder(out)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{out}: {parent} is not a folder that can be written to")
    if not out.exists():
        return
    if not overwrite:
        raise UserError(f"{out}: exists already (--overwrite replaces it)")
    manifest = out / MANIFEST
    if not manifest.is_file() or f'"format": "{FORMAT}"' not in manifest.read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"{out}: exists and is not a paged checkpoint; --overwrite replaces nothing else")


def _save_groups(folder: Path, groups: Iterable[dict[str, np.ndarray]]) -> dict:
    infos = {}
    for arrays in groups:
        names = {_group(name) for name in arrays}
        if len(names) != 1:
            raise ValueError(f"a group of arrays must be stored in one place, got {sorted(names)}")
        infos |= {name: array_info(array) for name, array in arrays.items()}
        ocp.save(folder / names.pop(), arrays)
    return infos


def save(
    out: Path,
    manifest: PagedManifest,
    groups: Iterable[dict[str, np.ndarray]],
    files: dict[str, Path],
    overwrite: bool = False,
) -> None:
    """Writes a paged checkpoint: complete at ``out``, or not there at all.

    Args:
      out: the folder to create.
      manifest: without ``arrays``, which are filled in here.
      groups: numpy arrays by name, one Orbax checkpoint each; may be a generator, one group is held at a time.
      files: source path of every other file, by its path inside ``out``.
      overwrite: replace a paged checkpoint that is already there.

    Raises:
      UserError: ``out`` exists and must not be replaced.
    """
    out = Path(out).absolute()
    check_output(out, overwrite)
    partial = _partial(out)
    if partial.exists():  # of a conversion that died
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        manifest = replace(manifest, arrays=_save_groups(partial / ARRAYS, groups))
        check_arrays(manifest)
        for name, source in sorted(files.items()):
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, partial / name)
        manifest_text = to_json(manifest)
        paths = [path for path in partial.rglob("*") if path.is_file()]
        checksums = {path.relative_to(partial).as_posix(): _sha256(path) for path in paths}
        checksums[MANIFEST] = hashlib.sha256(manifest_text.encode()).hexdigest()
        _write(partial / FILES, "".join(f"{checksums[name]}  {name}\n" for name in sorted(checksums)))
        _write(partial / MANIFEST, manifest_text)
        if out.exists():
            replaced = out.with_name(out.name + ".replaced")
            if replaced.exists():  # of an overwrite that died after its renames
                shutil.rmtree(replaced)
            out.rename(replaced)
            partial.rename(out)
            shutil.rmtree(replaced)
        else:
            partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


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
        if not (path / name).is_file():
            problems.append(f"{path / name}: missing")
        elif hashed(name) and _sha256(path / name) != digest:
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
        group = _group(names[0])
        tree = {other: ocp.PLACEHOLDER for other in self.manifest.arrays if _group(other) == group}
        for name in names:
            info = self.manifest.arrays[name]
            tree[name] = np.empty(info.shape, info.dtype)
        try:
            read = ocp.load(self.path / ARRAYS / group, tree)
        except Exception as error:  # Orbax and TensorStore raise many kinds; all of them mean bytes that cannot be read
            what = f"array {names[0]}" if len(names) == 1 else f"an array of {group}"
            first_line = str(error).strip().partition("\n")[0][:100]
            why = f"{type(error).__name__}: {first_line}"
            raise UserError(f"{self.path}: {what} is damaged or missing ({why}); copy or convert it again") from error
        for name in names:
            if array_info(read[name]) != self.manifest.arrays[name]:
                why = f"its shape, dtype or checksum is not the one in {MANIFEST}"
                raise UserError(f"{self.path}: array {name} is damaged ({why}); copy or convert it again")
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
        arrays = self._load(names)
        return jax.tree.unflatten(jax.tree.structure(abstract), [jnp.asarray(arrays[name], dtype) for name in names])

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


def _open(path: Path) -> PagedCheckpoint:
    path = Path(path).absolute()
    if not path.is_dir():
        hint = f" ({_partial(path).name} is of a conversion that did not finish)" if _partial(path).exists() else ""
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
