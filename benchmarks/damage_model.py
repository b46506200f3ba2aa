# SPDX-License-Identifier: Apache-2.0
"""A model whose every linear-block can be given its own bitwidth: unquantized weights beside those of each width."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.checkpoint import hf
from pagedweight_jax.checkpoint.paged import PagedCheckpoint
from pagedweight_jax.config import DOWN, GATE_UP
from pagedweight_jax.models.weights import ExpertWeights, Weights
from pallas_kernels.bitplane import dequantize_pages


@dataclass(frozen=True, kw_only=True)
class Model:
    """The unquantized weights, and the routed experts at each width: ``quantized[bits][layer][kind]`` is [E, N, C]."""

    weights: Weights
    quantized: dict[int, list[tuple[np.ndarray, np.ndarray]]]

    @property
    def max_bits(self) -> int:
        return max(self.quantized)

    def block(self, layer: int, expert: int, kind: int, bits: int) -> np.ndarray:
        return self.quantized[bits][layer][kind][expert]

    def at(self, bits_LEU: np.ndarray) -> Weights:
        """Returns the weights with every linear-block at its own width."""
        layers = []
        for number, (layer, bits_EU) in enumerate(zip(self.weights.layers, bits_LEU)):
            gate_up_ENC, down_ENC = (
                jnp.asarray(np.stack([self.block(number, e, kind, int(b)) for e, b in enumerate(bits_EU[:, kind])]))
                for kind in (GATE_UP, DOWN)
            )
            experts = ExpertWeights(gate_up_ENC=gate_up_ENC, down_ENC=down_ENC)
            layers.append(replace(layer, mlp=replace(layer.mlp, experts=experts)))
        return replace(self.weights, layers=tuple(layers))

    def squared_error(self, layer: int, kind: int, bits: int) -> np.ndarray:
        experts = self.weights.layers[layer].mlp.experts
        w_ENC = np.asarray((experts.gate_up_ENC, experts.down_ENC)[kind])
        return np.square(w_ENC - self.quantized[bits][layer][kind])


def read_model(folder: Path, checkpoint: PagedCheckpoint) -> Model:
    manifest = checkpoint.manifest
    weights = hf.load_weights(folder, manifest.config, jnp.float32)

    dequantize_U = [jax.jit(jax.vmap(partial(dequantize_pages, layout=layout))) for layout in manifest.layouts()]

    def experts(layer: int, kind: int) -> dict[int, np.ndarray]:
        pages = [checkpoint.load_pages(layer, kind, page) for page in range(manifest.max_bits)]
        return {
            b: np.asarray(dequantize_U[kind](pages[:b])) for b in range(manifest.min_bits, manifest.max_bits + 1)
        }

    read = [[experts(layer, kind) for kind in (GATE_UP, DOWN)] for layer in range(manifest.config.num_layers)]
    widths = range(manifest.min_bits, manifest.max_bits + 1)
    return Model(weights=weights, quantized={b: [(gu[b], down[b]) for gu, down in read] for b in widths})
