# SPDX-License-Identifier: Apache-2.0
"""The only door to Pallas' Triton backend, which JAX deprecated in 0.11: replace it here when it goes."""

from jax.experimental.pallas.triton import CompilerParams, elementwise_inline_asm, load, store

__all__ = ["CompilerParams", "elementwise_inline_asm", "load", "store"]
