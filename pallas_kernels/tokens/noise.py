# SPDX-License-Identifier: Apache-2.0
"""Gumbel noise as ``jax.random`` draws it, within a kernel: Threefry-2x32 of a key and a counter.

J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

import jax
import jax.numpy as jnp
from jax import lax

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
PARITY = 0x1BD11BDA


def threefry(key: tuple[jax.Array, jax.Array], x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns two words of uint32 of a key and a counter of two words each, which broadcast."""
    keys = *key, key[0] ^ key[1] ^ jnp.uint32(PARITY)
    a, b = x[0] + keys[0], x[1] + keys[1]
    for i in range(5):
        for bits in ROTATIONS[i % 2]:
            a = a + b
            b = a ^ ((b << jnp.uint32(bits)) | lax.shift_right_logical(b, jnp.uint32(32 - bits)))
        a, b = a + keys[(i + 1) % 3], b + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return a, b


def gumbel(seed: jax.Array, number: jax.Array, index: jax.Array) -> jax.Array:
    """Returns float32: element ``index`` of ``jax.random.gumbel(fold_in(key(seed), number), ..)``; all broadcast."""
    nothing = jnp.zeros_like(seed)
    key = threefry((nothing, seed), (nothing, number.astype(jnp.uint32)))
    a, b = threefry(key, (jnp.zeros_like(index, jnp.uint32), index.astype(jnp.uint32)))
    mantissa = lax.shift_right_logical(a ^ b, jnp.uint32(9)) | jnp.uint32(0x3F800000)
    uniform = jnp.maximum(lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0, jnp.finfo(jnp.float32).tiny)
    return -jnp.log(-jnp.log(uniform))
