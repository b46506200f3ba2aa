# SPDX-License-Identifier: Apache-2.0
"""``OUT/policy.json``: what ``pagedweight calibrate`` adds to a paged checkpoint for the online planner.

It belongs to one checkpoint, whose manifest it names by its digest, and carries its own. A checkpoint without it works:
then global damage alone decides.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from pagedweight_jax.checkpoint.draft import sync
from pagedweight_jax.checkpoint.manifest import MANIFEST
from pagedweight_jax.checkpoint.paged import PagedCheckpoint, sha256_of
from pagedweight_jax.errors import UserError
from pagedweight_jax.planning.calibration import Calibration, ResidualHeads
from pagedweight_jax.planning.pins import Pin, pinned_bits
from pagedweight_jax.planning.policy import Policy

POLICY = "policy.json"
FORMAT = "pagedweight policy"
FORMAT_VERSION = 2
AGAIN = "run pagedweight calibrate again"


@dataclass(frozen=True, kw_only=True)
class PolicyRun:
    """What the policy was measured on.

    Attributes:
      text_sha256: of the text's UTF-8 bytes.
      samples: sequences seen.
      sequence_length: tokens of each.
      seed: of the choice of sequences.
    """

    text_sha256: str
    samples: int
    sequence_length: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class OnlinePolicy:
    """Everything that the planner knows beyond the checkpoint's sensitivities. All of it is of one text.

    Attributes:
      run: that text.
      damage_LEUR: float64, g of each one-bit reduction, along R from the largest bitwidth down.
      mass_LE: float64, routing masses.
      features_LEUX: float64, means of the prompt features, NaN for a block without tokens.
      heads: predict the prompt residual.
      policy: how all of it counts.
      pins: experts that keep a bitwidth at least.
      fit: JSON values: ``held_out``, how well predictions fit sequences that neither means nor heads had seen;
        ``foresight``, what they are worth to the planner, where the means are of other sequences, the heads of all; and
        ``search``, what a search for the policy found, which begins with one that was chosen on all sequences.
    """

    run: PolicyRun
    damage_LEUR: np.ndarray
    mass_LE: np.ndarray
    features_LEUX: np.ndarray
    heads: ResidualHeads
    policy: Policy
    fit: dict
    pins: tuple[Pin, ...] = ()

    def calibration(self, checkpoint: PagedCheckpoint) -> Calibration:
        """Returns what the planner works from. Sensitivities are the checkpoint's at the largest bitwidth, and fall
        from there by ``damage_LEUR``.

        Raises:
          UserError: the arrays do not fit the checkpoint, or hold values that make no sense.
        """
        top_LEU1 = checkpoint.sensitivity[..., -1:]
        if self.damage_LEUR.shape[:3] != top_LEU1.shape[:3] or not (self.damage_LEUR >= 0).all():
            raise UserError(f"{POLICY}: damage_LEUR must be {list(top_LEU1.shape[:3])} x R and not negative")
        s_LEUQ = np.concatenate([top_LEU1, top_LEU1 + np.cumsum(self.damage_LEUR, axis=-1)], axis=-1)[..., ::-1]
        return Calibration(
            sensitivity_LEUQ=s_LEUQ,
            min_bits=checkpoint.manifest.min_bits,
            max_bits=checkpoint.manifest.max_bits,
            mass_LE=self.mass_LE,
            features_LEUX=self.features_LEUX,
            heads=self.heads,
            policy=self.policy,
            pinned_LEU=self._pinned_bits(checkpoint),
        )

    def _pinned_bits(self, checkpoint: PagedCheckpoint) -> np.ndarray | None:
        manifest = checkpoint.manifest
        shape_LEU = checkpoint.sensitivity.shape[:-1]
        return pinned_bits(self.pins, shape_LEU, manifest.min_bits, manifest.max_bits) if self.pins else None


def load_calibration(checkpoint: PagedCheckpoint) -> Calibration:
    """Returns what the planner works from: sensitivities and, if the checkpoint has one, its policy.

    Raises:
      UserError: as ``read_policy``.
    """
    online = read_policy(checkpoint)
    if online is not None:
        return online.calibration(checkpoint)
    manifest = checkpoint.manifest
    return Calibration(
        sensitivity_LEUQ=checkpoint.sensitivity, min_bits=manifest.min_bits, max_bits=manifest.max_bits
    )


def read_policy(checkpoint: PagedCheckpoint) -> OnlinePolicy | None:
    """Returns the checkpoint's policy, None if it has none.

    Raises:
      UserError: the policy is damaged or edited, of another version, or another checkpoint's.
    """
    path = checkpoint.path / POLICY
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__}: {error}); {AGAIN}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path}: not a {FORMAT}; {AGAIN}")
    if (version := content.get("format_version")) != FORMAT_VERSION:
        raise UserError(f"{path}: format_version {version}, this version reads {FORMAT_VERSION}; {AGAIN}")
    digest = content.pop("sha256", None)
    if digest != _digest(content):
        raise UserError(f"{path}: damaged or edited, its SHA-256 is not the one in it; {AGAIN}")
    if content["manifest_sha256"] != sha256_of(checkpoint.path / MANIFEST):
        raise UserError(f"{path}: made for another checkpoint, its {MANIFEST} is not this one's; {AGAIN}")
    return OnlinePolicy(
        run=PolicyRun(**content["run"]),
        damage_LEUR=_array(content["damage_LEUR"]),
        mass_LE=_array(content["mass_LE"]),
        features_LEUX=_array(content["features_LEUX"]),
        heads=ResidualHeads(**{name: _array(value) for name, value in content["heads"].items()}),
        policy=Policy(**{name: _tuples(value) for name, value in content["policy"].items()}),
        fit=content["fit"],
        pins=tuple(Pin(**pin) for pin in content.get("pins", ())),
    )


def write_policy(checkpoint: PagedCheckpoint, online: OnlinePolicy) -> Path:
    """Writes the checkpoint's policy, in place of the one that it may have, and returns its path: all or nothing.

    Raises:
      UserError: the arrays do not fit the checkpoint.
    """
    online.calibration(checkpoint)
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "manifest_sha256": sha256_of(checkpoint.path / MANIFEST),
        "run": asdict(online.run),
        "policy": asdict(online.policy),
        "pins": [asdict(pin) for pin in online.pins],
        "fit": online.fit,
        "heads": {field.name: _lists(getattr(online.heads, field.name)) for field in fields(ResidualHeads)},
        **{name: _lists(getattr(online, name)) for name in ("mass_LE", "features_LEUX", "damage_LEUR")},
    }
    content = json.loads(json.dumps(content))  # tuples are lists from here on: what is read is what was hashed
    path = checkpoint.path / POLICY
    unfinished = path.with_name(f".{POLICY}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps({"sha256": _digest(content), **content}) + "\n", encoding="utf-8")
        sync(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync(checkpoint.path)
    return path


def _digest(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _lists(array: np.ndarray) -> list:
    """Nested lists; null for NaN, which JSON does not have."""
    return np.where(np.isnan(array), None, array.astype(object)).tolist()


def _array(lists: list) -> np.ndarray:
    return np.array(lists, np.float64)


def _tuples(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
