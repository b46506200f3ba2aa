# SPDX-License-Identifier: Apache-2.0
"""Fisher rows of all layers, one layer in memory at a time: forward through the model, then backward.

The forward sweep leaves on the disk what enters each layer, the backward sweep takes it away again. Every layer is a
step of the draft each way, so a killed sweep goes on where it was.
"""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.calibrate.fisher import gradient_dtype, layer_gradient, layer_output, top_gradient
from pagedweight_jax.calibrate.hessian import first_alike
from pagedweight_jax.calibrate.hidden import HiddenStates
from pagedweight_jax.calibrate.layer import BATCH_SEQUENCES
from pagedweight_jax.calibrate.memory import experts_on_device, give_back
from pagedweight_jax.calibrate.prepare import Job
from pagedweight_jax.calibrate.stopwatch import Stopwatch
from pagedweight_jax.checkpoint import hf
from pagedweight_jax.checkpoint.draft import Draft
from pagedweight_jax.checkpoint.paged import Progress
from pagedweight_jax.config import KINDS
from pagedweight_jax.errors import UserError


def sweep(draft: Draft, job: Job, hidden: HiddenStates, progress: Progress, watch: Stopwatch) -> None:
    """Finishes the steps that ``fisher_rows`` reads.

    Args:
      draft: what enters the first layer is in its scratch folder, and stays there.
      job: the conversion.
      hidden: the draft's hidden states.
      progress: see ``Progress``; the stage is fisher, and counts sequences through a layer.
      watch: told where the time goes.

    Raises:
      UserError: a gradient is not finite.
    """
    config, num_sequences = job.manifest.config, len(job.sequences_NS)
    first = config.sparse_layers.index(True)
    total = (2 * config.num_layers - first) * num_sequences
    dtype = gradient_dtype(hidden.dtype)
    gradients = replace(hidden, suffix="gradient", dtype=dtype)

    def batches(begun: int) -> Iterator[slice]:
        for done in range(0, num_sequences, BATCH_SEQUENCES):
            progress("fisher", begun * num_sequences + done, total)
            yield slice(done, done + BATCH_SEQUENCES)

    for layer in range(config.num_layers):
        if draft.finished(f"forward-{layer:04d}"):
            continue
        w = _read_layer(job, layer, watch)
        with watch("calibrate"), hidden.write(layer + 1) as emit:
            x_NSD = hidden.read(layer)
            for batch in batches(layer):
                emit(layer_output(config, first_alike(config, layer), w, jnp.asarray(x_NSD[batch], dtype)))
        draft.commit(f"forward-{layer:04d}", [], {})
    if not draft.finished("top"):
        _top(job, hidden, gradients, watch)
        draft.commit("top", [], {})
    for layer in reversed(range(first, config.num_layers)):
        if not draft.finished(_step(layer)):
            w = _read_layer(job, layer, watch)
            with watch("calibrate"), gradients.write(layer) as emit:
                x_NSD, gradient_NSD = hidden.read(layer), gradients.read(layer + 1)
                sums = []
                for batch in batches(2 * config.num_layers - 1 - layer):
                    x_BSD = jnp.asarray(x_NSD[batch], dtype)
                    gradient_BSD, squares = jax.device_get(
                        layer_gradient(config, first_alike(config, layer), w, x_BSD, jnp.asarray(gradient_NSD[batch]))
                    )
                    emit(gradient_BSD)
                    sums.append(squares)
            draft.commit(_step(layer), [], _mean_squares(layer, sums, job.sequences_NS.size))
        gradients.drop(layer + 1)
        if layer:  # the conversion makes it again, when it is there
            hidden.drop(layer)
    progress("fisher", total, total)


def fisher_rows(draft: Draft, layer: int) -> dict[str, np.ndarray]:
    """Returns F of a layer's linear-blocks, float32 [E, N] by kind; nothing if it is dense."""
    return draft.recall(_step(layer)) if draft.finished(_step(layer)) else {}


def _step(layer: int) -> str:
    return f"fisher-{layer:04d}"


def _read_layer(job: Job, layer: int, watch: Stopwatch):
    give_back()
    with watch("read"):
        w = hf.read_layer(job.source, layer)
    with watch("calibrate"):
        return jax.tree.map(jnp.asarray, experts_on_device(w))


def _top(job: Job, hidden: HiddenStates, gradients: HiddenStates, watch: Stopwatch) -> None:
    num_layers = job.manifest.config.num_layers
    with watch("read"):
        outer = hf.read_outer(job.source)
    with watch("calibrate"), gradients.write(num_layers) as emit:
        if outer.lm_head_DV is not None:
            outer = replace(outer, embed_VD=None)
        outer = jax.tree.map(jnp.asarray, outer)
        for x_SD, tokens_S in zip(hidden.read(num_layers), job.sequences_NS):
            emit(top_gradient(outer, jnp.asarray(x_SD, gradients.dtype), jnp.asarray(tokens_S)))


def _mean_squares(layer: int, sums: list, num_tokens: int) -> dict[str, np.ndarray]:
    if sums[0] is None:
        return {}
    fisher = {}
    for name, *of_batches in zip(KINDS, *sums):
        total_EN = np.sum(of_batches, axis=0, dtype=np.float64)
        if not np.isfinite(total_EN).all():
            e, n = np.argwhere(~np.isfinite(total_EN))[0]
            raise UserError(f"layer {layer} {name}: expert {e}, row {n}: the loss's gradient is not finite")
        fisher[name] = (total_EN / num_tokens).astype(np.float32)
    return fisher
