# SPDX-License-Identifier: Apache-2.0
"""Activations that are no numbers: which layer's, and where they come up first."""

from collections.abc import Sequence

import numpy as np

from pagedweight_jax.config import KINDS
from pagedweight_jax.errors import UserError


def check_activations(
    layer: int,
    sequence: int,
    attended_BS: np.ndarray,
    left_BS: np.ndarray,
    ids_TK: np.ndarray | None = None,
    squares_UTK: Sequence[np.ndarray] = (),
) -> None:
    """Raises UserError if an activation is NaN or infinite, naming the first on the tokens' way through the layer.

    Args:
      layer: among all layers.
      sequence: the number of the batch's first calibration sequence.
      attended_BS: queries, keys and values are finite.
      left_BS: the hidden states that leave the layer are finite.
      ids_TK: the tokens' experts, if there are any.
      squares_UTK: of gate_up and down, finite if the inputs that a token has there are.
    """
    S = attended_BS.shape[1]

    def refuse(where: str, t: int, what: str) -> None:
        row = f"row {t % S} of calibration sequence {sequence + t // S}"
        raise UserError(f"layer {layer} {where}{row}: {what} are NaN or infinite")

    if not attended_BS.all():
        refuse("attention: ", int(attended_BS.argmin()), "queries, keys or values")
    for name, square_TK in zip(KINDS, squares_UTK):
        bad_TK = ~np.isfinite(square_TK)
        if bad_TK.any():
            t, k = np.argwhere(bad_TK)[0]
            refuse(f"{name}: expert {ids_TK[t, k]}, ", t, "the activations that enter, or their squares,")
    if not left_BS.all():
        refuse("output: ", int(left_BS.argmin()), "the activations")
