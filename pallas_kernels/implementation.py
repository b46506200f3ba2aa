# SPDX-License-Identifier: Apache-2.0
"""The choice between a kernel's definition and its Triton kernels."""

from importlib import import_module
from types import ModuleType

IMPLEMENTATIONS = ("xla", "triton")
"""Plain JAX, the definition, or Pallas kernels for NVIDIA GPUs."""


def module_of(package: str, implementation: str) -> ModuleType:
    """Returns the module of a kernel's package that holds its functions: ``reference`` or ``pallas_triton``.

    JAX may be without Triton, so the latter is imported when it is asked for, and not before.

    Args:
      package: the kernel's, such as ``__package__`` of its api.
      implementation: "xla" or "triton".

    Raises:
      ValueError: an unknown implementation.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is not one of {IMPLEMENTATIONS}")
    return import_module(f"{package}.{'reference' if implementation == 'xla' else 'pallas_triton'}")
