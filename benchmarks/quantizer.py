# SPDX-License-Identifier: Apache-2.0
"""Our any-precision quantizer beside the clustering that Any-Precision LLM uses, on the same cores in one run.

With a GPU, ours on it as well: the time is that of one block among the 60 of a layer of Qwen1.5-MoE.

Theirs: the package flash1dkmeans (``pip install flash1dkmeans``, which needs numba), driven as in that method:
k-means++ and Lloyd's algorithm for the lowest width, then every cluster cut in two by a binary search, row by row.

    python benchmarks/quantizer.py                      # 2816 x 2048, 3 to 8 bits, two threads
    python benchmarks/quantizer.py --rows 64 --rounds 1 # a quick look
"""

import argparse
import importlib.metadata
import os
import time
from collections.abc import Callable

import flash1dkmeans
import jax
import jax.numpy as jnp
import numba
import numpy as np
from record import append_result

from pagedweight_jax.calibrate.any_precision import (
    AnyPrecision,
    positive_importance,
    quantize_on_device,
    quantize_on_host,
)
from pagedweight_jax.calibrate.sensitivity import sensitivity

MIN_BITS, MAX_BITS = 3, 8
LLOYD_STEPS = 50
"""The most that Any-Precision LLM allows."""

_seed = flash1dkmeans.numba_kmeans_1d_k_cluster
_cut = flash1dkmeans.numba_kmeans_1d_two_cluster


@numba.njit
def _cluster_row(w_C, h_C, min_bits, max_bits, random_state, codes_C, lut_BK):
    """Fills codes_C and lut_BK, of which width min_bits + b has its centroids in the first places of row b."""
    order = np.argsort(w_C)
    x, h = w_C[order], h_C[order]
    mass, moment, square = np.cumsum(h), np.cumsum(h * x), np.cumsum(h * x * x)
    centroids, borders = _seed(x, 2**min_bits, LLOYD_STEPS, mass, moment, square, 0, len(x), random_state)
    lut_BK[0, : len(centroids)] = centroids
    for level in range(1, max_bits - min_bits + 1):
        K = len(borders) - 1
        finer, children = np.empty(2 * K + 1, borders.dtype), np.empty(2 * K)
        finer[0] = borders[0]
        for k in range(K):
            start, stop = borders[k], borders[k + 1]
            finer[2 * k + 1], finer[2 * k + 2] = stop, stop
            children[2 * k], children[2 * k + 1] = centroids[k], centroids[k]
            if stop > start:
                pair, cut = _cut(x, mass, moment, start, stop)
                finer[2 * k + 1] = cut[1]
                children[2 * k], children[2 * k + 1] = pair[0], pair[1]
        borders, centroids = finer, children
        lut_BK[level, : 2 * K] = centroids
    for k in range(len(borders) - 1):
        codes_C[order[borders[k] : borders[k + 1]]] = k


@numba.njit(parallel=True)
def _cluster_rows(w_RC, h_C, min_bits, max_bits, random_state):
    """Returns codes uint8 [R, C] and centroids [R, widths, 2^max_bits]."""
    R, C = w_RC.shape
    codes_RC = np.empty((R, C), np.uint8)
    lut_RBK = np.zeros((R, max_bits - min_bits + 1, 2**max_bits))
    for r in numba.prange(R):
        _cluster_row(w_RC[r], h_C, min_bits, max_bits, random_state, codes_RC[r], lut_RBK[r])
    return codes_RC, lut_RBK


def theirs(w_ENC: np.ndarray, importance_EC: np.ndarray) -> AnyPrecision:
    """Returns one block quantized by flash1dkmeans."""
    h_C = positive_importance(importance_EC)[0]
    codes_NC, lut_NBK = _cluster_rows(w_ENC[0].astype(np.float64), h_C, MIN_BITS, MAX_BITS, 0)
    lut_NBK = lut_NBK.astype(np.float16)
    luts = {bits: lut_NBK[None, :, bits - MIN_BITS, : 2**bits] for bits in range(MIN_BITS, MAX_BITS + 1)}
    return AnyPrecision(codes_NC[None], luts)


def ours(w_ENC: np.ndarray, importance_EC: np.ndarray) -> AnyPrecision:
    return quantize_on_host(w_ENC, positive_importance(importance_EC), MIN_BITS, MAX_BITS)[0]


def on_device(w_ENC: np.ndarray, importance_EC: np.ndarray, rounds: int) -> dict:
    """Returns the time of one block on the GPU, its weights already there, and which codes differ from the host's."""
    w_60NC = jnp.tile(jnp.asarray(w_ENC), (60, 1, 1))
    h_60C = jnp.tile(jnp.asarray(importance_EC, jnp.float32), (60, 1))
    h_60C = positive_importance(np.asarray(h_60C))
    seconds = []
    for _ in range(rounds + 1):  # the first one compiles
        start = time.perf_counter()
        quantized, _ = quantize_on_device(w_60NC, h_60C, MIN_BITS, MAX_BITS)
        jax.block_until_ready(quantized.codes_ENC)
        seconds.append(time.perf_counter() - start)
    expected = quantize_on_host(w_ENC, h_60C[:1], MIN_BITS, MAX_BITS)[0]
    differ_NC = np.asarray(quantized.codes_ENC[0]) != expected.codes_ENC[0]
    return {
        "device_first_s": seconds[0],
        "device_wall_s": min(seconds[1:]) / 60,
        "device_other_codes": int(differ_NC.sum()),
        "device_other_rows": int(differ_NC.any(1).sum()),
        "device_temporary_bytes": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0),
    }


def timed(function: Callable, *arguments) -> tuple[AnyPrecision, float, float]:
    """Returns the result, wall seconds, and processor seconds of all threads."""
    wall, processor = time.perf_counter(), time.process_time()
    result = function(*arguments)
    return result, time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=2816)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3, help="of both in turn; the fastest counts")
    parser.add_argument("--results", default="benchmarks/results/quantizer.jsonl")
    args = parser.parse_args()
    everywhere = os.sched_getaffinity(0)
    cores = sorted(everywhere)[-2:]
    os.sched_setaffinity(0, cores)
    os.cpu_count = lambda: len(cores)  # what the quantizer sizes its pool by
    numba.set_num_threads(min(len(cores), numba.config.NUMBA_NUM_THREADS))

    rng = np.random.default_rng(0)
    w_ENC = rng.standard_normal((1, args.rows, args.columns)).astype(np.float32) * args.columns**-0.5
    importance_EC = rng.chisquare(1, (1, args.columns))
    theirs(w_ENC[:, :4], importance_EC)  # compiles
    ours(w_ENC[:, :4], importance_EC)
    rounds = [(timed(ours, w_ENC, importance_EC), timed(theirs, w_ENC, importance_EC)) for _ in range(args.rounds)]
    record = {"rows": args.rows, "columns": args.columns, "bits": [MIN_BITS, MAX_BITS], "threads": len(cores)}
    record["flash1dkmeans"] = importlib.metadata.version("flash1dkmeans")
    record["numba"] = numba.__version__
    errors = {}
    for i, name in enumerate(("ours", "theirs")):
        errors[name] = sensitivity(w_ENC, rounds[0][i][0], importance_EC, MIN_BITS, MAX_BITS)[0]
        record[f"{name}_wall_s"] = min(pair[i][1] for pair in rounds)
        record[f"{name}_processor_s"] = min(pair[i][2] for pair in rounds)
    os.sched_setaffinity(0, everywhere)
    if jax.default_backend() == "gpu":
        record |= on_device(w_ENC, importance_EC, args.rounds)
        record["device_wall_ratio"] = record["device_wall_s"] / record["theirs_wall_s"]
    record["wall_ratio"] = record["ours_wall_s"] / record["theirs_wall_s"]
    record["processor_ratio"] = record["ours_processor_s"] / record["theirs_processor_s"]
    record["error_ratio"] = dict(zip(range(MIN_BITS, MAX_BITS + 1), (errors["ours"] / errors["theirs"]).tolist()))
    for name, value in record.items():
        print(f"{name:20} {value}")
    append_result(args.results, "quantizer", record)


if __name__ == "__main__":
    main()
