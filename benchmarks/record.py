# SPDX-License-Identifier: Apache-2.0
"""Results as JSON lines: what was measured, with the commit, the versions and the device that it was measured on."""

import json
import os
import platform
import subprocess
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


def append_result(path: str | Path, name: str, record: dict) -> None:
    """Appends one JSON line, ``{"name": name, **record, "environment": ...}``, to ``path``."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"name": name, **record, "environment": environment()}) + "\n")
