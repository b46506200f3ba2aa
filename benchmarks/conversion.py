# SPDX-License-Identifier: Apache-2.0
"""The computing of a full-size conversion: Qwen1.5-MoE-A2.7B with random weights is calibrated, quantized and packed.

Every layer is drawn anew (in the place of reading it), goes through the converter's own code, and its pages are dropped
(in the place of writing them), so no disk is needed and none is timed.

    python benchmarks/conversion.py                       # 24 layers of 60 experts, 100 sequences of 512 tokens
    python benchmarks/conversion.py --layers 1 --experts 4 --samples 4
"""

import argparse
import resource
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from random_checkpoint import RandomCheckpoint, qwen_moe_config
from record import append_result

from pagedweight_jax.calibrate.hidden import HiddenStates
from pagedweight_jax.calibrate.layer import convert_layer
from pagedweight_jax.calibrate.prepare import MIN_TOKENS, device_peak_bytes
from pagedweight_jax.calibrate.stopwatch import Stopwatch
from pagedweight_jax.checkpoint.paged import no_progress
from pagedweight_jax.models.weights import LayerWeights, init_weights


@partial(jax.jit, static_argnums=0)
def _random_layer(config, key: jax.Array) -> LayerWeights:
    return init_weights(config, key, jnp.bfloat16).layers[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=60)
    parser.add_argument("--bits", type=int, nargs=2, default=(3, 8))
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--results", default="benchmarks/results/conversion.jsonl")
    args = parser.parse_args()

    config = qwen_moe_config(args.layers, args.experts, vocab_size=1024)
    manifest = RandomCheckpoint.make(config, *args.bits).manifest
    one_layer, watch = qwen_moe_config(1, args.experts, vocab_size=1024), Stopwatch()
    layers, pages_bytes, first = [], 0, None
    with tempfile.TemporaryDirectory() as folder:
        shape_NSD = (args.samples, args.sequence_length, config.hidden_size)
        hidden = HiddenStates(Path(folder), shape_NSD, np.dtype(jnp.bfloat16), 1 << 40)
        rng = np.random.default_rng(0)
        with hidden.write(0) as emit:
            for _ in range(args.samples):
                emit(rng.standard_normal(shape_NSD[1:], np.float32).astype(jnp.bfloat16))
        for layer in range(args.layers):
            start = time.perf_counter()
            with watch("read"):
                w = jax.device_get(_random_layer(one_layer, jax.random.key(layer, impl="rbg")))
            layer_weights = sum(leaf.size for leaf in jax.tree.leaves(w))
            groups, _ = convert_layer(w, manifest, layer, hidden, MIN_TOKENS, no_progress, watch)
            pages_bytes += sum(page.nbytes for page in groups[0].values())
            del w, groups
            layers.append(time.perf_counter() - start)
            first = first or dict(watch.seconds)
            so_far = ", ".join(f"{stage} {spent:.2f}" for stage, spent in watch.seconds.items())
            print(f"layer {layer}: {layers[-1]:.2f} s; so far {so_far}", flush=True)
            hidden.drop_before(layer + 1)
    record = {"layers": args.layers, "experts": args.experts, "bits": list(args.bits), "samples": args.samples}
    record["weights"] = args.layers * args.experts * sum(layout.rows * layout.columns for layout in manifest.layouts())
    record["seconds"] = {name: watch.seconds[name] for name in ("calibrate", "quantize", "pack")}
    record["compute_s"] = sum(record["seconds"].values())
    record["first_layer_s"] = {name: first[name] for name in record["seconds"]}
    record["pages_bytes"] = pages_bytes
    record["layer_float32_bytes"] = 4 * layer_weights
    record["hidden_bytes"] = hidden.nbytes
    record["peak_host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    record["peak_device_bytes"] = device_peak_bytes()
    for name, value in record.items():
        print(f"{name:20} {value}")
    append_result(args.results, "conversion", record)


if __name__ == "__main__":
    main()
