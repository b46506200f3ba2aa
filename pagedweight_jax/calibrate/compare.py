# SPDX-License-Identifier: Apache-2.0
"""A paged checkpoint against the model that it was made from."""

from dataclasses import dataclass, fields
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.calibrate.any_precision import positive_importance
from pagedweight_jax.calibrate.fisher import row_weights
from pagedweight_jax.checkpoint import hf
from pagedweight_jax.checkpoint.dense import named_leaves
from pagedweight_jax.checkpoint.paged import PagedCheckpoint, Progress, no_progress
from pagedweight_jax.config import KINDS
from pagedweight_jax.errors import UserError
from pagedweight_jax.models.weights import Weights, without_experts
from pallas_kernels.bitplane import dequantize_pages

TOLERANCE = 1e-6
"""Relative difference between two sums of one error in float64."""


@dataclass(frozen=True)
class Comparison:
    """What a comparison found.

    Attributes:
      problems: one line for each array or linear-block that does not fit the source.
      blocks: linear-blocks compared, at every bitwidth each.
      worst: largest |recomputed - stored| / stored error of a block.
    """

    problems: list[str]
    blocks: int
    worst: float


def compare_with_source(
    checkpoint: PagedCheckpoint, folder: Path, progress: Progress = no_progress
) -> Comparison:
    """Returns how the pages' weighted errors, recomputed from the source, differ from the stored sensitivities.

    Recomputed is eq. 2, sum_nc f_n h_c (W_nc - W^b_nc)^2, with the stored importance (and Fisher rows, if there are
    any) and the weights that the pages give at each bitwidth. Dense weights must be the source's.

    Args:
      checkpoint: a paged checkpoint.
      folder: the Hugging Face folder that it was made from.
      progress: see ``Progress``; the stage is source.

    Raises:
      UserError: the folder holds another model, or an array is damaged.
    """
    manifest = checkpoint.manifest
    config = hf.load_config(folder)
    for field in fields(config):
        if (mine := getattr(manifest.config, field.name)) != (theirs := getattr(config, field.name)):
            raise UserError(f"{folder}: another model, {field.name} is {theirs}, the checkpoint's {mine}")
    source = hf.open_source(folder, config, lambda line: None)
    sensitivity_LEUQ, worst, problems = checkpoint.sensitivity, 0.0, []
    problems += _dense_problems(checkpoint, hf.read_outer(source), "dense/")
    for layer in range(config.num_layers):
        w = hf.read_layer(source, layer)
        model = Weights(config=config, embed_VD=None, layers=(w,), norm_D=None, lm_head_DV=None)
        problems += _dense_problems(checkpoint, without_experts(model).layers[0], f"dense/layers.{layer}.")
        if not config.sparse_layers[layer]:
            continue
        sparse_layer = sum(config.sparse_layers[:layer])
        for kind, name in enumerate(KINDS):
            progress("source", len(KINDS) * sparse_layer + kind, len(KINDS) * config.num_sparse_layers)
            w_ENC = (w.mlp.experts.gate_up_ENC, w.mlp.experts.down_ENC)[kind]
            stored_EQ = sensitivity_LEUQ[sparse_layer, :, kind]
            difference_EQ = np.abs(_errors(checkpoint, sparse_layer, kind, w_ENC) - stored_EQ)
            relative_EQ = difference_EQ / np.maximum(stored_EQ, np.finfo(np.float64).tiny)
            worst = max(worst, float(relative_EQ.max()))
            for e, q in np.argwhere(~(relative_EQ <= TOLERANCE)):
                problems.append(
                    f"layer {layer} {name}: expert {e} at {manifest.min_bits + q} bits differs from the source: its "
                    f"error is {relative_EQ[e, q]:.2g} off the stored {stored_EQ[e, q]:.6g}"
                )
    progress("source", len(KINDS) * config.num_sparse_layers, len(KINDS) * config.num_sparse_layers)
    return Comparison(problems, len(KINDS) * config.num_sparse_layers * config.num_experts, worst)


def _dense_problems(checkpoint: PagedCheckpoint, weights: object, prefix: str) -> list[str]:
    return [
        f"array {prefix}{name} differs from the source"
        for name, leaf in named_leaves(weights).items()
        if not np.array_equal(checkpoint.load(prefix + name), leaf)
    ]


def _errors(checkpoint: PagedCheckpoint, sparse_layer: int, kind: int, w_ENC: np.ndarray) -> np.ndarray:
    """Returns the weighted error of every block at every bitwidth, float64 [E, Q]."""
    manifest, layout = checkpoint.manifest, checkpoint.manifest.layouts()[kind]
    h_EC = positive_importance(checkpoint.importance(kind)[sparse_layer])
    fisher_LEN = checkpoint.fisher(kind)
    f_EN = np.ones(w_ENC.shape[:2])
    if fisher_LEN is not None:
        f_EN = row_weights(fisher_LEN[sparse_layer], checkpoint.uncalibrated[sparse_layer]).astype(np.float64)
    pages = [checkpoint.load_pages(sparse_layer, kind, page) for page in range(manifest.max_bits)]
    dequantize = jax.jit(lambda block: dequantize_pages(block, layout))
    error_EQ = np.empty((len(w_ENC), manifest.max_bits - manifest.min_bits + 1))
    for e in range(len(w_ENC)):
        w_NC = w_ENC[e].astype(np.float64)
        for q, bits in enumerate(range(manifest.min_bits, manifest.max_bits + 1)):
            paged_NC = np.asarray(dequantize([jnp.asarray(page[e]) for page in pages[:bits]]))
            error_EQ[e, q] = f_EN[e] @ np.square(paged_NC - w_NC) @ h_EC[e]
    return error_EQ
