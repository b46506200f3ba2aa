# SPDX-License-Identifier: Apache-2.0
"""What states of a model cost: KL to the unquantized model and loss, with any blocks lowered.

A state in which one block alone is lowered runs again only the layers behind that block.
"""

from dataclasses import dataclass
from functools import partial
from itertools import product

import damage_proxies as proxies
import jax
import jax.numpy as jnp
import numpy as np
from damage_model import Model

from pagedweight_jax.config import DOWN, GATE_UP
from pagedweight_jax.models.layers import activation, mlp
from pagedweight_jax.models.weights import MLPWeights, Weights


def _compare(logp_TV, reference_TV, tokens_T):
    """KL to the reference and loss, nats per predicted token."""
    logp_TV, reference_TV = logp_TV[:-1], reference_TV[:-1]
    kl = jnp.mean(jnp.sum(jnp.exp(reference_TV) * (reference_TV - logp_TV), -1))
    return jnp.stack([kl, -jnp.mean(jnp.take_along_axis(logp_TV, tokens_T[1:, None], -1))])


@jax.jit
def _reference(weights, windows_BT):
    return jax.lax.map(lambda tokens_T: proxies.trace(weights, tokens_T), windows_BT)


@jax.jit
def _whole(weights, windows_BT, reference_BTV):
    def one(operands):
        return _compare(proxies.trace(weights, operands[0])[0], operands[1], operands[0])

    return jnp.mean(jax.lax.map(one, (windows_BT, reference_BTV)), 0)


@partial(jax.jit, static_argnums=1)
def _one_block(weights, layer, expert, new, windows_BT, reference_BTV, seen_B):
    """As ``_whole`` with one expert (gate_up_NC, down_NC) replaced, from the layer's cached states on."""
    act, experts = activation(weights.config.hidden_act), weights.layers[layer].mlp.experts

    def run(m_TD, gate_up_NC, down_NC):
        gate_FD, up_FD = jnp.split(gate_up_NC, 2)
        return mlp(m_TD, MLPWeights(gate_DF=gate_FD.T, up_DF=up_FD.T, down_FD=down_NC.T), act)

    def one(operands):
        tokens_T, reference_TV, (x_TD, m_TD, ids_TK, weights_TK) = operands
        r_T1 = jnp.sum(jnp.where(ids_TK == expert, weights_TK, 0), -1)[:, None]
        change_TD = run(m_TD, *new) - run(m_TD, experts.gate_up_ENC[expert], experts.down_ENC[expert])
        return _compare(proxies.tail(weights, layer + 1, x_TD + r_T1 * change_TD), reference_TV, tokens_T)

    return jnp.mean(jax.lax.map(one, (windows_BT, reference_BTV, seen_B)), 0)


@dataclass(frozen=True)
class Scorer:
    """KL and loss of states of the model on some windows."""

    model: Model
    windows_BT: jax.Array
    reference_BTV: jax.Array

    @classmethod
    def on(cls, model: Model, windows: np.ndarray) -> "Scorer":
        windows_BT = jnp.asarray(windows)
        return cls(model, windows_BT, _reference(model.weights, windows_BT)[0])

    def full(self) -> np.ndarray:
        config = self.model.weights.config
        return np.full((config.num_layers, config.num_experts, 2), self.model.max_bits, np.uint8)

    def score(self, weights: Weights) -> np.ndarray:
        """Returns (KL, loss) of the model with these weights."""
        return np.asarray(_whole(weights, self.windows_BT, self.reference_BTV), np.float64)

    def state(self, bits_LEU: np.ndarray) -> np.ndarray:
        """Returns (KL, loss) with these bits."""
        return self.score(self.model.at(bits_LEU))

    def single_blocks(self, experts: np.ndarray) -> np.ndarray:
        """Returns KL and loss, [L, experts, U, Q, 2], with one block at each width and all others at max bits."""
        base, widths = self.model.at(self.full()), sorted(self.model.quantized)
        seen_L = _reference(base, self.windows_BT)[1]
        score_LEUQ2 = np.empty((len(seen_L), len(experts), 2, len(widths), 2))
        score_LEUQ2[...] = self.state(self.full())
        for layer, kind, (q, bits) in product(range(len(seen_L)), (GATE_UP, DOWN), enumerate(widths[:-1])):
            for i, expert in enumerate(experts):
                new = tuple(
                    self.model.block(layer, expert, u, bits if u == kind else widths[-1]) for u in (GATE_UP, DOWN)
                )
                operands = (expert, new, self.windows_BT, self.reference_BTV, seen_L[layer])
                score_LEUQ2[layer, i, kind, q] = _one_block(base, layer, *operands)
        return score_LEUQ2
