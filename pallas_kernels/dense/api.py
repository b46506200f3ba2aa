# SPDX-License-Identifier: Apache-2.0
"""Products with dense matrices in the forward pass: their meaning, and the choice of implementation.

All sums are float32, of exact products (no TF32 for float32 inputs). Matrices are stored [in, out]. "triton" has
kernels for up to 16 rows; beyond that, where XLA's products are faster, it is "xla". Within 1 to 16 rows, and within 17
to 64, a row's result depends neither on their number nor on the others.
"""

import jax

from pallas_kernels.implementation import module_of
from pallas_kernels.moe_ffn.pages import ACTIVATIONS


def _check_shapes(x: jax.Array, *weights: jax.Array) -> None:
    if any(x.shape[-1] != w.shape[0] for w in weights):
        raise ValueError(f"shapes disagree: rows {x.shape}, matrices {', '.join(str(w.shape) for w in weights)}")


def project(
    x_TD: jax.Array,
    weights: tuple[jax.Array, ...],
    *,
    biases: tuple[jax.Array | None, ...] | None = None,
    implementation: str = "xla",
) -> tuple[jax.Array, ...]:
    """Returns ``x @ w + bias`` for each of the matrices, [T, N] in x's dtype, in one kernel.

    Args:
      x_TD: token rows.
      weights: matrices [D, N], of one N or several.
      biases: for each matrix [N] or None; None for no biases.
      implementation: "xla", the definition, or "triton", a Pallas kernel for NVIDIA GPUs.

    Raises:
      ValueError: an unknown implementation, or shapes that do not agree.
    """
    _check_shapes(x_TD, *weights)
    biases = (None,) * len(weights) if biases is None else tuple(biases)
    return module_of(__package__, implementation).project(x_TD, tuple(weights), biases)


def project_parts(h_TC: jax.Array, w_CD: jax.Array, *, implementation: str = "xla") -> jax.Array:
    """Returns S parts whose sum is ``h @ w``, float32[S, T, D]: each of one stretch of the contraction.

    S follows from the shapes alone; for 1 to 16 rows it is the same. Who reads the parts adds them in their order.

    Args:
      h_TC: token rows.
      w_CD: the matrix.
      implementation: "xla", the definition, or "triton", a Pallas kernel for NVIDIA GPUs.

    Raises:
      ValueError: an unknown implementation, or shapes that do not agree.
    """
    _check_shapes(h_TC, w_CD)
    return module_of(__package__, implementation).project_parts(h_TC, w_CD)


def add_norm(
    x_TD: jax.Array,
    norm_D: jax.Array,
    eps: float,
    *,
    parts_STD: jax.Array | None = None,
    factor_T1: jax.Array | None = None,
    routed: tuple[jax.Array, jax.Array] | None = None,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Returns (x', RMS norm of x'), [T, D] in x's dtype, of x with what the products before left in parts::

        x'_t = x_t + (sum_k weights_tk y_tk + factor_t sum_s parts_st)

    The bracket is summed in float32 and rounded to x's dtype before it is added. "triton" is "xla" beyond 64 rows.

    Args:
      x_TD: the residual stream.
      norm_D, eps: the norm's weights, and what is added to the mean square.
      parts_STD: float32, of ``project_parts``; None for none.
      factor_T1: float32, one factor a row of them (the shared expert's gate); None for 1.
      routed: (y_TKD, weights_TK), float32: rows with weights (the routed experts'); None for none.
      implementation: "xla", the definition, or "triton", a Pallas kernel for NVIDIA GPUs.

    Raises:
      ValueError: an unknown implementation, or shapes that do not agree.
    """
    shapes = [] if parts_STD is None else [parts_STD.shape[1:]]
    shapes += [] if routed is None else [(*routed[1].shape[:1], *routed[0].shape[2:])]
    if any(shape != x_TD.shape for shape in shapes) or norm_D.shape != x_TD.shape[1:]:
        raise ValueError(f"shapes disagree: rows {x_TD.shape}, norm {norm_D.shape}, addends {shapes}")
    return module_of(__package__, implementation).add_norm(x_TD, norm_D, eps, parts_STD, factor_T1, routed)


def gated(
    x_TD: jax.Array,
    gate_DF: jax.Array,
    up_DF: jax.Array,
    *,
    activation: str = "silu",
    implementation: str = "xla",
) -> jax.Array:
    """Returns ``act(x @ gate) * (x @ up)``, [T, F] in x's dtype, in one kernel.

    Args:
      x_TD: token rows.
      gate_DF, up_DF: the matrices.
      activation: a key of ``ACTIVATIONS``.
      implementation: "xla", the definition, or "triton", a Pallas kernel for NVIDIA GPUs.

    Raises:
      ValueError: an unknown implementation or activation, or shapes that do not agree.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {sorted(ACTIVATIONS)}")
    _check_shapes(x_TD, gate_DF, up_DF)
    return module_of(__package__, implementation).gated(x_TD, gate_DF, up_DF, activation)


def logits(x_TD: jax.Array, head: jax.Array, *, transposed: bool = False, implementation: str = "xla") -> jax.Array:
    """Returns ``x @ head``, float32[T, V].

    Args:
      x_TD: hidden states after the final norm.
      head: [D, V]; or [V, D], the embedding, where ``transposed``.
      transposed: whether the head is stored [V, D]; it is read as it lies.
      implementation: "xla", the definition, or "triton", a Pallas kernel for NVIDIA GPUs.

    Raises:
      ValueError: an unknown implementation, or shapes that do not agree.
    """
    if x_TD.shape[-1] != head.shape[1 if transposed else 0]:
        raise ValueError(f"shapes disagree: rows {x_TD.shape}, head {head.shape}, transposed {transposed}")
    return module_of(__package__, implementation).logits(x_TD, head, transposed)
