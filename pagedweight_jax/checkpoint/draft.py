# SPDX-License-Identifier: Apache-2.0
"""A paged checkpoint while it is written: step by step, so that a killed writer goes on after its last finished step.

    OUT.partial/inputs.json          what the checkpoint is made from: a draft of other inputs is thrown away
    OUT.partial/steps/{step}.npz     a finished step: checksums of the arrays it wrote, and what it has to remember
    OUT.partial/scratch/             the writer's own files, and arrays that are not complete
    OUT.partial/checkpoint/          becomes OUT in one rename, once its manifest is written

A step is finished when its .npz is renamed into place; before that its arrays are on the disk.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
from orbax.checkpoint.experimental import v1 as ocp

from pagedweight_jax.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    ArrayInfo,
    PagedManifest,
    array_info,
    check_arrays,
    to_json,
)
from pagedweight_jax.checkpoint.paged import (
    ARRAYS,
    FILES,
    group_of,
    partial_folder,
    plain_files,
    quiet_orbax,
    sha256_of,
)
from pagedweight_jax.errors import UserError

INFOS = "array_infos"

ARRAY_BYTES = 32 << 10
"""What an array takes on the disk beside its values, at most: its folders, its description, its last block's rest."""


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


def sync(path: Path) -> None:
    """Returns when a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)


@dataclass(frozen=True)
class Draft:
    """An unfinished checkpoint, held by one process (see ``open_draft``).

    Attributes:
      out: where it will be.
      folder: where it is.
    """

    out: Path
    folder: Path

    @property
    def scratch(self) -> Path:
        """A folder for what the steps hand on to each other; it goes when the checkpoint is finished."""
        return self.folder / "scratch"

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def _record(self, step: str) -> Path:
        return self.folder / "steps" / f"{step}.npz"

    def finished(self, step: str) -> bool:
        """True if ``commit`` of this step has returned, now or before this process."""
        return self._record(step).exists()

    def steps(self) -> list[str]:
        """Returns the finished steps."""
        return sorted(path.stem for path in (self.folder / "steps").glob("*.npz"))

    def recall(self, step: str) -> dict[str, np.ndarray]:
        """Returns what a finished step had to remember."""
        with np.load(self._record(step)) as record:
            return {name: record[name] for name in record.files if name != INFOS}

    def array_infos(self, step: str) -> dict[str, ArrayInfo]:
        """Returns the arrays that a finished step wrote."""
        with np.load(self._record(step)) as record:
            infos = json.loads(str(record[INFOS]))
        return {name: ArrayInfo(**info | {"shape": tuple(info["shape"])}) for name, info in infos.items()}

    def commit(self, step: str, groups: Iterable[dict[str, np.ndarray]], remember: dict[str, np.ndarray]) -> None:
        """Writes arrays and finishes the step: all of it, or, if the process dies, nothing that counts.

        Args:
          step: its name.
          groups: numpy arrays by name, all arrays of one ``group_of`` together; may be a generator, one group is held
            at a time.
          remember: small arrays for ``recall``.
        """
        infos = {}
        for arrays in groups:
            infos |= {name: array_info(array) for name, array in arrays.items()}
            for group, names in groupby(sorted(arrays, key=group_of), group_of):
                self._save(self._checkpoint / ARRAYS / group, {name: arrays[name] for name in names})
        record, unfinished = self._record(step), self.scratch / "record.npz"
        fields = {name: asdict(info) for name, info in infos.items()}
        np.savez(unfinished, **remember, **{INFOS: np.asarray(json.dumps(fields))})
        sync(unfinished)
        unfinished.rename(record)
        sync(record.parent)

    def _save(self, place: Path, arrays: dict[str, np.ndarray]) -> None:
        unfinished = self.scratch / ARRAYS
        for path in (unfinished, *self.scratch.glob(f"{ARRAYS}.*"), place):  # of a step that was cut short
            shutil.rmtree(path, ignore_errors=True)
        needed_bytes = sum(array.nbytes + ARRAY_BYTES for array in arrays.values())
        if needed_bytes > shutil.disk_usage(self.scratch).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # sooner and more quietly than TensorStore would
        with quiet_orbax(), plain_files():
            ocp.save(unfinished, arrays)
        for path in unfinished.rglob("*"):
            sync(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished.rename(place)
        sync(place.parent)

    def publish(self, manifest: PagedManifest, files: dict[str, Path], overwrite: bool) -> None:
        """Makes the draft the checkpoint at ``out``, complete, and removes what is left of the draft.

        Args:
          manifest: without ``arrays``, which are those of all steps.
          files: source path of every other file, by its path inside ``out``.
          overwrite: replace a paged checkpoint that is already there.

        Raises:
          UserError: the arrays are not those that the model and the bits ask for; or ``out`` is complete, but what is
            left beside it cannot be removed.
        """
        infos = {}
        for step in self.steps():
            infos |= self.array_infos(step)
        manifest = replace(manifest, arrays=infos)
        check_arrays(manifest)
        for path in self._checkpoint.iterdir():  # of a publication that was cut short
            if path.name != ARRAYS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name, source in sorted(files.items()):
            (self._checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, self._checkpoint / name)
            sync(self._checkpoint / name)
        manifest_text = to_json(manifest)
        paths = [path for path in self._checkpoint.rglob("*") if path.is_file()]
        with ThreadPoolExecutor() as pool:
            digests = pool.map(sha256_of, paths)
            checksums = {path.relative_to(self._checkpoint).as_posix(): digest for path, digest in zip(paths, digests)}
        checksums[MANIFEST] = hashlib.sha256(manifest_text.encode()).hexdigest()
        _write(self._checkpoint / FILES, "".join(f"{checksums[name]}  {name}\n" for name in sorted(checksums)))
        _write(self._checkpoint / MANIFEST, manifest_text)
        replaced = self.out.with_name(self.out.name + ".replaced")
        if overwrite and replaced.exists() and self.out.exists():  # of an overwrite that died after its renames
            shutil.rmtree(replaced)
        if self.out.exists():
            self.out.rename(replaced)
        self._checkpoint.rename(self.out)
        leftovers = [replaced, self.folder] if overwrite and replaced.exists() else [self.folder]
        try:
            sync(self.out.parent)
            for leftover in leftovers:
                shutil.rmtree(leftover)
        except OSError as error:
            names = " and ".join(leftover.name for leftover in leftovers)
            raise UserError(f"{self.out}: complete, but then: {error}; {names} may be removed") from error


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lets in one process at a time; a process that dies lets go."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{folder}: another process is writing there") from error
        yield
    finally:
        os.close(descriptor)


def _is_full(error: Exception) -> bool:
    """True if a disk or a quota is full; Orbax and TensorStore say so in words only."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or os.strerror(errno.ENOSPC) in str(error) or os.strerror(errno.EDQUOT) in str(error)


def _why_not(draft: Draft, inputs: dict[str, object]) -> str:
    """Why a draft cannot be taken up; empty if it can."""
    try:
        found = json.loads((draft.folder / "inputs.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "what it was made from is not known"
    others = sorted(name for name in found.keys() | inputs.keys() if found.get(name) != inputs.get(name))
    if others:
        return f"it was made from another {' and '.join(others)}"
    written = {group_of(name) for step in draft.steps() for name in draft.array_infos(step)}
    lost = [group for group in sorted(written) if not (draft.folder / "checkpoint" / ARRAYS / group).is_dir()]
    return f"its {lost[0]} is gone" if lost else ""


@contextmanager
def open_draft(
    out: Path, inputs: dict[str, object], overwrite: bool = False, report: Callable[[str], None] = print
) -> Iterator[Draft]:
    """Yields the draft of ``out``: the unfinished one of the same inputs if there is one, else an empty one.

    An exception leaves it as it is if a step is finished, else removes it.

    Args:
      out: the checkpoint's folder.
      inputs: JSON values by name; everything that the checkpoint follows from.
      overwrite: a paged checkpoint at ``out`` may be replaced.
      report: gets one line if a draft is there already.

    Raises:
      UserError: ``out`` cannot be written or exists, another process writes it, or a file cannot be read or written:
        the disk is full, a limit is reached.
    """
    out = Path(out).absolute()
    check_output(out, overwrite)
    inputs = json.loads(json.dumps(inputs))
    draft = Draft(out, partial_folder(out))
    draft.folder.mkdir(parents=True, exist_ok=True)
    with _held(draft.folder):
        try:
            if any(draft.folder.iterdir()):
                if why := _why_not(draft, inputs):
                    report(f"{draft.folder}: starting anew, {why}")
                    for path in draft.folder.iterdir():
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                elif draft.steps():
                    report(f"{draft.folder}: continuing after {len(draft.steps())} finished steps")
            for name in ("scratch", "steps", "checkpoint"):
                (draft.folder / name).mkdir(exist_ok=True)
            _write(draft.folder / "inputs.json", json.dumps(inputs))
            yield draft
        except UserError:  # says itself what is there, and may quote a full disk
            raise
        except Exception as error:
            full = _is_full(error)
            if not full and not isinstance(error, OSError):
                raise
            steps = len(draft.steps())
            kept = f"{steps} finished steps are kept in {draft.folder.name}, run the same command again"
            why = "no space left on the disk" if full else str(error)
            raise UserError(f"{out}: {why}; {kept if steps else 'nothing was written'}") from error
        finally:
            if draft.folder.exists() and not draft.steps():
                shutil.rmtree(draft.folder, ignore_errors=True)  # what ended it is told, not this


def save(
    out: Path,
    manifest: PagedManifest,
    groups: Iterable[dict[str, np.ndarray]],
    files: dict[str, Path],
    overwrite: bool = False,
) -> None:
    """Writes a whole paged checkpoint in one step. Arguments and errors as in ``Draft`` and ``open_draft``."""
    inputs = {"process": os.urandom(16).hex()}  # nothing to go on from
    with open_draft(out, inputs, overwrite) as draft:
        draft.commit("all", groups, {})
        try:
            draft.publish(manifest, files, overwrite)
        except BaseException:
            shutil.rmtree(draft.folder, ignore_errors=True)
            raise
