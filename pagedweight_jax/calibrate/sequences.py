# SPDX-License-Identifier: Apache-2.0
"""What single sequences do to the routed experts: damage of every action, routing masses, prompt features.

Damage needs no forward pass per action. With the importance h_c that one sequence gives to the columns of a block (see
``routed``), lowering the block from b to b - 1 bits costs

    D  =  sum_c h_c delta_c        delta_c  =  sum_n f_n (W^b_nc - W^(b-1)_nc)^2

because a centroid of b - 1 bits is the weighted mean of its two children: the weighted error of b - 1 bits less that of
b bits is the weighted square of their difference. The row weights f_n are ones in a checkpoint without Fisher rows. All
of it follows from the checkpoint's pages; the forward pass runs at the largest bitwidth. One layer is in memory at a
time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.calibrate.fisher import row_weights
from pagedweight_jax.calibrate.hidden import HiddenStates
from pagedweight_jax.calibrate.routed import error_sums, hidden_squares, routed_experts
from pagedweight_jax.checkpoint.dense import abstract_dense, named_leaves
from pagedweight_jax.checkpoint.draft import Draft
from pagedweight_jax.checkpoint.paged import PagedCheckpoint, Progress, no_progress
from pagedweight_jax.config import DOWN, GATE_UP, ModelConfig
from pagedweight_jax.models.attention import dense_attention
from pagedweight_jax.models.layers import Activation, activation
from pagedweight_jax.models.moe import relative_sizes
from pagedweight_jax.models.transformer import decoder_layer
from pagedweight_jax.models.weights import ExpertWeights, LayerWeights
from pallas_kernels.bitplane import BlockLayout, dequantize_pages


@dataclass(frozen=True, kw_only=True)
class SequenceStatistics:
    """N sequences, each cut into Z spans of equal length: float32 means over a span's tokens, but for the last two.

    Attributes:
      damage_NZLEUR: D of each one-bit reduction, along R from the largest bitwidth down.
      mass_NZLE: the routing weights r of the tokens that chose the expert.
      norm_NZLEU: s, the relative size of what a token takes from the block (``planning.signals``).
      square_NZLEU: s^2.
      max_NZLEU: the largest s.
      tokens_NZLE: int32, how many tokens chose the expert.
    """

    damage_NZLEUR: np.ndarray
    mass_NZLE: np.ndarray
    norm_NZLEU: np.ndarray
    square_NZLEU: np.ndarray
    max_NZLEU: np.ndarray
    tokens_NZLE: np.ndarray

    def __len__(self) -> int:
        return len(self.mass_NZLE)

    def take(self, index_N: np.ndarray) -> "SequenceStatistics":
        """Returns some of the sequences."""
        return SequenceStatistics(**{field.name: getattr(self, field.name)[index_N] for field in fields(self)})


def run_layer(
    config: ModelConfig,
    layer: int,
    w: LayerWeights,
    delta_UECR: tuple[np.ndarray, ...],
    x_NSD: Iterable[np.ndarray],
    span_tokens: int,
) -> Iterator[tuple[dict[str, np.ndarray] | None, np.ndarray]]:
    """Yields, sequence by sequence, the layer's statistics and the hidden states [S, D] that leave it.

    The statistics are the fields of ``SequenceStatistics`` without their axes N and L, by the first part of their
    names; None if the layer is dense.

    Args:
      config: the model.
      layer: among all layers.
      w: its weights, with the experts.
      delta_UECR: delta_c of both kinds' blocks (see the module).
      x_NSD: the sequences' hidden states that enter it.
      span_tokens: tokens of a span; they divide S.
    """
    kinds = list(zip(config.sparse_layers, config.windows))
    same = kinds.index(kinds[layer])  # layers alike compile once
    for x_SD in x_NSD:
        yield jax.device_get(_run_sequence(config, same, span_tokens, w, delta_UECR, jnp.asarray(x_SD)))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run_sequence(config, layer: int, span_tokens: int, w: LayerWeights, delta_UECR: tuple, x_SD: jax.Array):
    act = activation(config.hidden_act)

    def attend(_, layer, q_SHM, k_SJM, v_SJM):
        return None, dense_attention(q_SHM, k_SJM, v_SJM, config.head_dim**-0.5, config.windows[layer])

    def experts(_, sparse_layer, *routed):
        return routed, routed_experts(*routed, w.mlp.experts, act)

    routed, x_SD = decoder_layer(config, layer, w, x_SD, jnp.arange(len(x_SD)), None, attend, experts)
    if routed is None:
        return None, x_SD
    spans = jax.tree.map(lambda a: a.reshape(-1, span_tokens, a.shape[-1]), (x_SD, *routed))
    return jax.lax.map(lambda span: _span_statistics(*span, w.mlp.experts, delta_UECR, act), spans), x_SD


def _span_statistics(x_TD, m_TD, ids_TK, weights_TK, experts: ExpertWeights, delta_UECR: tuple, act: Activation):
    num_tokens, num_experts = len(x_TD), len(experts.down_ENC)
    *h_UEC, tokens_E = error_sums(x_TD, m_TD, ids_TK, weights_TK, experts, act)
    damage_UER = [jnp.einsum("EC,ECR->ER", h_EC, delta_ECR) for h_EC, delta_ECR in zip(h_UEC, delta_UECR)]
    residual_square_T = jnp.sum(jnp.square(x_TD.astype(jnp.float32)), axis=-1)
    sizes = relative_sizes(weights_TK, residual_square_T, hidden_squares(m_TD, ids_TK, experts, act))
    return {
        "damage": jnp.stack(damage_UER, axis=1) / num_tokens,
        **usage(ids_TK, weights_TK, jnp.stack(sizes, axis=-1), num_experts),
        "tokens": tokens_E,
    }


def usage(ids_TK: jax.Array, weights_TK: jax.Array, size_TKU: jax.Array, num_experts: int) -> dict[str, jax.Array]:
    """Returns mass, norm, square and max of a span's T tokens, by the first part of their names in the statistics.

    No scatter is involved: a GPU's adds in any order, and the same text would not give the same policy.

    Args:
      ids_TK, weights_TK: the tokens' experts, and r.
      size_TKU: s.
      num_experts: E.
    """
    chosen_TKE1 = (ids_TK[..., None] == jnp.arange(num_experts))[..., None]

    def by_expert(values_TKX):  # [T, K, E, X]
        return jnp.where(chosen_TKE1, values_TKX[:, :, None], 0.0)

    def mean(values_TKX):
        return jnp.sum(by_expert(values_TKX), axis=(0, 1)) / len(ids_TK)

    return {
        "mass": mean(weights_TK[..., None])[:, 0],
        "norm": mean(size_TKU),
        "square": mean(jnp.square(size_TKU)),
        "max": jnp.max(by_expert(size_TKU), axis=(0, 1)),
    }


# The checkpoint's weights


def read_blocks(checkpoint: PagedCheckpoint, sparse_layer: int, kind: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a layer's blocks of one kind at the largest bitwidth, float32 [E, N, C], and their delta_ECR, float32.

    Args:
      checkpoint: where the pages are.
      sparse_layer: 0 .. L-1.
      kind: GATE_UP or DOWN.
    """
    manifest, layout = checkpoint.manifest, checkpoint.manifest.layouts()[kind]
    pages = [checkpoint.load_pages(sparse_layer, kind, page) for page in range(manifest.max_bits)]
    fisher_LEN, f_EN = checkpoint.fisher(kind), [None] * manifest.config.num_experts
    if fisher_LEN is not None:
        f_EN = row_weights(fisher_LEN[sparse_layer], checkpoint.uncalibrated[sparse_layer])
    w_ENC = np.empty((manifest.config.num_experts, layout.rows, layout.columns), np.float32)
    delta_ECR = np.empty((len(w_ENC), layout.columns, manifest.max_bits - manifest.min_bits), np.float32)
    for e in range(len(w_ENC)):
        w_ENC[e], delta_ECR[e] = _read_block([page[e] for page in pages], layout, f_EN[e])
    return w_ENC, delta_ECR


@partial(jax.jit, static_argnums=1)
def _read_block(
    pages: list[jax.Array], layout: BlockLayout, f_N: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    high_NC = w_NC = dequantize_pages(pages, layout)
    delta_CR = []
    for bits in range(layout.max_bits - 1, layout.min_bits - 1, -1):
        low_NC = dequantize_pages(pages[:bits], layout)
        square_NC = jnp.square(high_NC - low_NC)
        delta_CR.append(jnp.sum(square_NC if f_N is None else f_N[:, None] * square_NC, axis=0))
        high_NC = low_NC
    return w_NC, jnp.stack(delta_CR, axis=-1) if delta_CR else jnp.zeros((layout.columns, 0))


def read_layer(checkpoint: PagedCheckpoint, layer: int) -> tuple[LayerWeights, tuple[np.ndarray, ...]]:
    """Returns a layer's weights, float32, its experts at the largest bitwidth; and delta_ECR of both kinds, if any."""
    config = checkpoint.manifest.config
    abstract = abstract_dense(config).layers[layer]
    leaves = [checkpoint.load(f"dense/layers.{layer}.{name}") for name in named_leaves(abstract)]
    w = jax.tree.unflatten(jax.tree.structure(abstract), [jnp.asarray(leaf, jnp.float32) for leaf in leaves])
    if not config.sparse_layers[layer]:
        return w, ()
    sparse_layer = sum(config.sparse_layers[:layer])
    (gate_up_ENC, gate_up_ECR), (down_ENC, down_ECR) = (
        read_blocks(checkpoint, sparse_layer, kind) for kind in (GATE_UP, DOWN)
    )
    experts = ExpertWeights(gate_up_ENC=jnp.asarray(gate_up_ENC), down_ENC=jnp.asarray(down_ENC))
    return replace(w, mlp=replace(w.mlp, experts=experts)), (gate_up_ECR, down_ECR)


# All layers


def measure_sequences(
    checkpoint: PagedCheckpoint,
    sequences_NS: np.ndarray,
    span_tokens: int,
    draft: Draft,
    progress: Progress = no_progress,
) -> SequenceStatistics:
    """Returns the statistics of every sequence.

    A layer that the draft has finished, now or before, is not run again.

    Args:
      checkpoint: the model.
      sequences_NS: int32 tokens.
      span_tokens: tokens of a span; they divide S.
      draft: keeps finished layers, and the hidden states between two of them.
      progress: see ``Progress``; the stage is sequences.
    """
    config = checkpoint.manifest.config
    num_sequences, S = sequences_NS.shape
    hidden = HiddenStates(draft.scratch, (num_sequences, S, config.hidden_size), np.dtype(np.float32), ram_bytes=0)
    if not draft.finished("embedding"):
        embed_VD = checkpoint.load("dense/embed_VD")
        with hidden.write(0) as emit:
            for tokens_S in sequences_NS:
                emit(embed_VD[tokens_S].astype(np.float32))
        draft.commit("embedding", [], {})
    for layer in range(config.num_layers):
        if not draft.finished(_step(layer)):
            w, delta_UECR = read_layer(checkpoint, layer)
            seen = []
            with hidden.write(layer + 1) as emit:
                run = run_layer(config, layer, w, delta_UECR, hidden.read(layer), span_tokens)
                for n, (one, y_SD) in enumerate(run):
                    progress("sequences", layer * num_sequences + n, config.num_layers * num_sequences)
                    emit(y_SD)
                    seen.append(one)
            remember = {name: np.stack([one[name] for one in seen]) for name in seen[0] or ()}
            draft.commit(_step(layer), [], remember)
        hidden.drop_before(layer + 1)
    progress("sequences", config.num_layers * num_sequences, config.num_layers * num_sequences)
    sparse = [draft.recall(_step(layer)) for layer, is_sparse in enumerate(config.sparse_layers) if is_sparse]
    names = [field.name for field in fields(SequenceStatistics)]
    return SequenceStatistics(
        **{name: np.stack([one[name.split("_")[0]] for one in sparse], axis=2) for name in names}
    )


def _step(layer: int) -> str:
    return f"layer-{layer:04d}"
