# SPDX-License-Identifier: Apache-2.0
"""Which kernels the steps run on: plain JAX (``xla``, the definition) or Pallas through Triton (``triton``)."""

import re

import jax

from pagedweight_jax.config import ModelConfig
from pagedweight_jax.errors import UserError
from pallas_kernels.implementation import IMPLEMENTATIONS

LEAST_CAPABILITY = (8, 0)
"""CUDA compute capability that has the kernels' tensor core instructions."""


def default_implementation() -> str:
    """Returns what a step runs on that was not told: ``triton`` where JAX's default backend is a GPU, else ``xla``."""
    return "triton" if jax.default_backend() == "gpu" else "xla"


def choose_implementation(name: str | None, model: ModelConfig, device: jax.Device) -> str:
    """Returns what an engine for ``model`` on ``device`` runs on.

    Args:
      name: ``xla`` or ``triton``; None for ``triton`` where the device and the model's shapes allow it, else ``xla``.
      model: what is to be served.
      device: where.

    Raises:
      UserError: ``triton`` was asked for, and the device or a shape of the model is not one that it has kernels for.
    """
    if name not in (*IMPLEMENTATIONS, None):
        raise UserError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    hindrance = _device_hindrance(device) or _shape_hindrance(model)
    if name == "triton" and hindrance:
        raise UserError(f"implementation triton cannot run: {hindrance}; implementation xla runs anywhere")
    return name or ("xla" if hindrance else "triton")


def _device_hindrance(device: jax.Device) -> str | None:
    if device.platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU, the device is {device.platform}"
    version = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))  # gfx... on other makes
    if version is None or tuple(map(int, version.groups())) < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        found = f"{device.device_kind} has {version[0]}" if version else f"the device is {device.device_kind}"
        return f"it needs an NVIDIA GPU of compute capability {least} or more, {found}"
    return None


def _shape_hindrance(model: ModelConfig) -> str | None:
    if model.head_dim & (model.head_dim - 1) or model.head_dim < 16:
        return f"it needs heads of a power of two, 16 or wider, the model's are {model.head_dim} wide"
    for kind in range(2):
        rows, columns = model.block_shape(kind)
        if rows % 16:
            return f"it needs linear-blocks of rows in multiples of 16, the model has {rows}x{columns}"
    return None
