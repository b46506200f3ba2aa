# SPDX-License-Identifier: Apache-2.0
"""Pins: experts that keep a bitwidth at least, whatever the pressure and the policy."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedweight_jax.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Pin:
    """Both blocks of some experts are never lowered below ``bits`` bits.

    Attributes:
      bits: at least.
      layer: counted among the layers that have routed experts; None for all.
      expert: None for all of the layer.
    """

    bits: int
    layer: int | None = None
    expert: int | None = None


def parse_pin(text: str) -> Pin:
    """Returns the pin that ``text`` writes: ``LAYER.EXPERT=BITS``, with ``*`` for all.

    Raises:
      UserError: it is written in another way.
    """
    match = re.fullmatch(r"(\*|\d+)\.(\*|\d+)=(\d+)", text)
    if not match:
        raise UserError(f"pin {text!r}: write LAYER.EXPERT=BITS, * for all, as in 0.*=5")
    layer, expert = (None if number == "*" else int(number) for number in match.groups()[:2])
    return Pin(layer=layer, expert=expert, bits=int(match[3]))


def pinned_bits(pins: Sequence[Pin], shape_LEU: tuple[int, int, int], min_bits: int, max_bits: int) -> np.ndarray:
    """Returns the bits below which no block is lowered, uint8 [L, E, U]: of all pins the highest, else ``min_bits``.

    Args:
      pins: in any order.
      shape_LEU: of the result.
      min_bits, max_bits: the supported bitwidths.

    Raises:
      UserError: a pin names a layer, an expert or a bitwidth that there is not.
    """
    least_LEU = np.full(shape_LEU, min_bits, np.uint8)
    for pin in pins:
        for name, number, count in (("layer", pin.layer, shape_LEU[0]), ("expert", pin.expert, shape_LEU[1])):
            if number is not None and not 0 <= number < count:
                raise UserError(f"pin: {name} {number} is not one of 0..{count - 1}")
        if not min_bits <= pin.bits <= max_bits:
            raise UserError(f"pin: {pin.bits} bits are not among {min_bits}..{max_bits}")
        layers = slice(None) if pin.layer is None else pin.layer
        experts = slice(None) if pin.expert is None else pin.expert
        least_LEU[layers, experts] = np.maximum(least_LEU[layers, experts], np.uint8(pin.bits))
    return least_LEU
