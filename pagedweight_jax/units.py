# SPDX-License-Identifier: Apache-2.0
"""Sizes and counts as people write and read them."""

import re

from pagedweight_jax.errors import UserError

SIZE_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("iB", 1024), ("B", 1000))
}


def parse_size(text: str) -> int:
    """Returns bytes from ``10GiB``, ``1.5 GiB``, ``512MiB``, ``10GB`` (powers of 1000) or plain bytes.

    Raises:
      UserError: it is none of these, or not positive.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B|B|)", text.strip())
    size = int(float(match[1]) * SIZE_UNITS[match[2]]) if match else 0
    if size <= 0:
        raise UserError(f"size {text!r}: write it like 10GiB, 512MiB or 1073741824")
    return size


def _three_digits(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def format_size(num_bytes: int) -> str:
    """Returns a size for people, to three digits: ``12.3 MiB``."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while num_bytes >= 1000 * 1024**power and power < len(units) - 1:
        power += 1
    return f"{_three_digits(num_bytes / 1024**power)} {units[power]}" if power else f"{num_bytes} B"


def format_count(count: int) -> str:
    """Returns a number for people, to three digits: ``14.3 B``, ``2.70 M``, ``512``."""
    for power, unit in ((9, "B"), (6, "M"), (3, "K")):
        if count >= 10**power:
            return f"{_three_digits(count / 10**power)} {unit}"
    return str(count)
