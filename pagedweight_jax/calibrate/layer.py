# SPDX-License-Identifier: Apache-2.0
"""One layer of a conversion: calibrate, quantize, pack."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import jax
import numpy as np

from pagedweight_jax.calibrate.any_precision import AnyPrecision, quantize
from pagedweight_jax.calibrate.fisher import row_weights
from pagedweight_jax.calibrate.hessian import InputMoments, importance, run_layer
from pagedweight_jax.calibrate.hidden import HiddenStates
from pagedweight_jax.calibrate.sensitivity import sensitivity
from pagedweight_jax.calibrate.stopwatch import Stopwatch
from pagedweight_jax.checkpoint.dense import named_leaves
from pagedweight_jax.checkpoint.manifest import PagedManifest, page_name
from pagedweight_jax.checkpoint.paged import Progress
from pagedweight_jax.config import KINDS
from pagedweight_jax.errors import UserError
from pagedweight_jax.models.weights import ExpertWeights, LayerWeights
from pallas_kernels.bitplane import BlockLayout, pack_page

BATCH_SEQUENCES = 4
"""Calibration sequences that go through a layer together."""

Arrays = dict[str, np.ndarray]


def convert_layer(
    w: LayerWeights,
    manifest: PagedManifest,
    layer: int,
    hidden: HiddenStates,
    fisher: Arrays,
    min_tokens: int,
    progress: Progress,
    watch: Stopwatch,
) -> tuple[list[Arrays], Arrays]:
    """Returns the layer's arrays by name, place by place, and what calibration knows of its experts (none if dense).

    What calibration knows is, by the array's name behind ``calibration/``: sensitivity [E, U, Q], importance/gate_up
    [E, D], importance/down [E, F], uncalibrated [E], tokens [E]; and ``fisher`` under fisher/.

    Args:
      w: its weights, with the experts.
      manifest: bits and layouts.
      layer: among all layers.
      hidden: holds what enters the layer; what leaves it is written there if a later layer needs it.
      fisher: F of its linear-blocks' rows by kind, float32 [E, N] (see ``fisher``); empty to weight all rows alike.
      min_tokens: an expert of fewer calibration tokens takes its layer's average importance.
      progress: see ``Progress``; the stages are calibrate and quantize.
      watch: told where the time goes.

    Raises:
      UserError: a weight or an activation is not finite.
    """
    with watch("calibrate"):
        moments = _calibrate(manifest, layer, w, hidden, progress)
    groups, remember = [], {}
    if moments is not None:
        pages, remember = _convert_experts(
            manifest, layer, w.mlp.experts, moments, fisher, min_tokens, progress, watch
        )
        w = replace(w, mlp=replace(w.mlp, experts=None))
        groups.append(pages)
    groups.append({f"dense/layers.{layer}.{name}": leaf for name, leaf in named_leaves(w).items()})
    return groups, remember


def _calibrate(
    manifest: PagedManifest, layer: int, w: LayerWeights, hidden: HiddenStates, progress: Progress
) -> InputMoments | None:
    config = manifest.config
    if not any(config.sparse_layers[layer:]):
        return None
    x_NSD = hidden.read(layer)
    num_sequences = len(x_NSD)
    total = config.num_layers * num_sequences

    def batches() -> Iterator[np.ndarray]:
        for done in range(0, num_sequences, BATCH_SEQUENCES):
            progress("calibrate", layer * num_sequences + done, total)
            yield x_NSD[done : done + BATCH_SEQUENCES]
        progress("calibrate", (layer + 1) * num_sequences, total)

    needed_later = any(config.sparse_layers[layer + 1 :])
    with hidden.write(layer + 1) if needed_later else nullcontext(lambda x_BSD: None) as emit:
        return run_layer(config, layer, w, batches(), emit)


def _convert_experts(
    manifest: PagedManifest,
    layer: int,
    experts: ExpertWeights,
    moments: InputMoments,
    fisher: Arrays,
    min_tokens: int,
    progress: Progress,
    watch: Stopwatch,
) -> tuple[Arrays, Arrays]:
    """Returns the pages, and what calibration knows."""
    config = manifest.config
    sparse_layer = sum(config.sparse_layers[:layer])
    num_steps = len(KINDS) * config.num_sparse_layers
    for moment_EC, name in zip((moments.gate_up_EC, moments.down_EC), KINDS):
        if not np.isfinite(moment_EC).all():
            e, c = np.argwhere(~np.isfinite(moment_EC))[0]
            raise UserError(
                f"layer {layer} {name}: expert {e}, column {c}: the squared activations sum to infinity"
            )
    *importance_U, uncalibrated_E = importance(moments, min_tokens)
    pages, sensitivity_UEQ = {}, []
    remember = {"uncalibrated": uncalibrated_E, "tokens": moments.tokens_E}
    remember |= {f"fisher/{name}": fisher_EN for name, fisher_EN in fisher.items()}
    for kind, name in enumerate(KINDS):
        progress("quantize", len(KINDS) * sparse_layer + kind, num_steps)
        layout, importance_EC = manifest.layouts()[kind], importance_U[kind].astype(np.float32)
        w_ENC = (experts.gate_up_ENC, experts.down_ENC)[kind]
        with watch("quantize"):
            quantized = quantize(w_ENC, importance_EC, layout.min_bits, layout.max_bits, name=f"layer {layer} {name}")
            f_EN = row_weights(fisher[name], uncalibrated_E) if fisher else None
            s_EQ = sensitivity(w_ENC, quantized, importance_EC, layout.min_bits, layout.max_bits, f_EN)
            sensitivity_UEQ.append(s_EQ)
        with watch("pack"):
            kind_pages = _pack(quantized, layout)
        pages |= {page_name(sparse_layer, kind, page): words for page, words in enumerate(kind_pages)}
        remember[f"importance/{name}"] = importance_EC
    progress("quantize", len(KINDS) * (sparse_layer + 1), num_steps)
    return pages, remember | {"sensitivity": np.stack(sensitivity_UEQ, axis=1)}


def _pack(quantized: AnyPrecision, layout: BlockLayout) -> list[np.ndarray]:
    """Returns all pages of one kind of linear-block, in host memory."""
    pack = _pack_on_device if isinstance(quantized.codes_ENC, jax.Array) else pack_page

    def words(page: int) -> np.ndarray:
        return np.asarray(pack(quantized.codes_ENC, quantized.luts.get(page + 1), page, layout))

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # programs compile side by side, too
        return list(pool.map(words, range(layout.max_bits)))


_pack_on_device = jax.jit(pack_page, static_argnums=(2, 3))
