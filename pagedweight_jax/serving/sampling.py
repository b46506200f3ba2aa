# SPDX-License-Identifier: Apache-2.0
"""On-device sampling: greedy or by temperature, one independent random stream per request."""

import jax
import jax.numpy as jnp


def sample(logits_BV: jax.Array, temperature_B: jax.Array, seed_B: jax.Array, position_B: jax.Array) -> jax.Array:
    """Returns int32[B], the next token of each row.

    A row's draw is a function of its own logits, seed and position alone (Gumbel-max over logits / temperature), so it
    does not depend on the batch, the row or how steps are grouped into calls. Temperature 0 takes the argmax.

    Args:
      logits_BV: float32.
      temperature_B: float32, 0 for greedy.
      seed_B: uint32.
      position_B: int32, the position of the token that is drawn.
    """

    def draw(logits_V, temperature, seed, position):
        key = jax.random.fold_in(jax.random.key(seed), position)
        noise_V = jax.random.gumbel(key, logits_V.shape, jnp.float32)
        scaled_V = logits_V / jnp.where(temperature > 0, temperature, 1.0)
        return jnp.argmax(scaled_V + jnp.where(temperature > 0, noise_V, 0.0)).astype(jnp.int32)

    return jax.vmap(draw)(logits_BV, temperature_B, seed_B, position_B)
