# SPDX-License-Identifier: Apache-2.0
"""Results as JSON lines: what was measured, with the commit, the versions and the device that it was measured on."""

import json
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np


def commit() -> str:
    """Returns the checkout's commit, marked where files differ from it.

    Where there is no checkout (a copy of its files on another machine), ``PAGEDWEIGHT_COMMIT`` says it, else "unknown".
    """
    if stated := os.environ.get("PAGEDWEIGHT_COMMIT"):
        return stated
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude", "*"], capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"


def environment() -> dict[str, str]:
    """Returns what a figure depends on besides the code's arguments."""
    device = jax.devices()[0]
    return {
        "commit": commit(),
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


@dataclass(frozen=True)
class Results:
    """A file of records of one run: what the run depends on is asked once, whatever happens to the checkout meanwhile.

    Attributes:
      path: the file.
      about: ``environment()`` when the run began.
    """

    path: Path
    about: dict[str, str] = field(default_factory=environment)


def append_result(results: str | Path | Results, name: str, record: dict) -> None:
    """Appends one JSON line, ``{"name": name, **record, "environment": ...}``.

    Args:
      results: the file; as ``Results`` where a run appends more than one line.
      name: what was measured.
      record: its figures.
    """
    results = results if isinstance(results, Results) else Results(Path(results))
    results.path.parent.mkdir(parents=True, exist_ok=True)
    with results.path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"name": name, **record, "environment": results.about}) + "\n")
