# SPDX-License-Identifier: Apache-2.0
"""Times the dense products and the routing of a decode step beside XLA's own, all in one run.

    python benchmarks/kernels_dense.py [--sweep] [--only REGEX] [--tokens 1,4,16] [--seconds 80] [--out FILE.jsonl]

Sizes of Qwen1.5-MoE. Each figure is the median of 21 runs of one jitted loop, divided by its calls. The calls take
several sets of weights in turn, together larger than the L2 cache; after a turn a tiny kernel, which is counted, reads
every result and makes the next turn wait for them. ``layer`` is a chain: norm, projections, output projection, sum and
norm, routing, the shared expert, sum; each waits for the one before (attention, rope and experts left out). Everything
is compiled first. Results are held to the definition on the same arrays. Bytes are those of the weights; ``read`` is a
kernel that only reads them.
``--sweep`` also times other program sizes. Without a GPU the kernels are interpreted on tiny sizes: a check of this
script, not a timing.
"""

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

sys.path.insert(0, str(Path(__file__).parents[1]))

from record import Results, append_result

from pallas_kernels._triton import CompilerParams
from pallas_kernels.dense import pallas_triton, reference
from pallas_kernels.dense.columns import Cut, launch
from pallas_kernels.routing import pallas_triton as routing_triton
from pallas_kernels.routing import reference as routing_reference

ON_GPU = jax.devices()[0].platform == "gpu"
CEILING_GB_S = 4300
"""Of a device copy on an H200."""

D, N, F, E, V = (2048, 2048, 5632, 60, 151936) if ON_GPU else (64, 64, 96, 7, 256)
K, EPS = 4, 1e-6
ROUNDS = 3 if ON_GPU else 1


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation.

    Attributes:
      name: of the operation.
      call: (triton, options, x, weights, others) -> result.
      weights: shapes of one set of matrices.
      width: columns of x.
      others: tokens -> the (shape, dtype) of further arrays.
      sets, turns: sets of weights, and how often a loop's body takes all of them.
      chained: whether the result is the next call's x.
      cuts: of the sweep, as columns, depth, stretches, warps, stages.
    """

    name: str
    call: Callable
    weights: tuple[tuple[int, ...], ...]
    width: int
    others: Callable = lambda tokens: ()
    sets: int = 8
    turns: int = 6
    chained: bool = False
    cuts: str = ""


def project(triton, options, x, w, others):
    return (pallas_triton if triton else reference).project(x, w, tuple(others), **options)


def project_parts(triton, options, x, w, others):
    return (pallas_triton if triton else reference).project_parts(x, w[0], **options)


def gated(triton, options, x, w, others):
    return (pallas_triton if triton else reference).gated(x, *w, "silu", **options)


def route(triton, options, x, w, others):
    router, shared_gate = w
    return (routing_triton if triton else routing_reference).route(x, router, K, False, shared_gate, **options)


def logits(transposed, triton, options, x, w, others):
    return (pallas_triton if triton else reference).logits(x, w[0], transposed, **options)


def add_norm(triton, options, x, w, others):
    return (pallas_triton if triton else reference).add_norm(x, w[0], EPS, *others, None, **options)


def read_only(x, w):
    """Returns sums of blocks of the matrices: what reading them takes, each program a piece that hangs together."""
    length = 2**15 if ON_GPU else 2**10
    counts = [matrix.size // length for matrix in w]

    def kernel(x, *refs):
        *matrices, out = refs
        program, start = pl.program_id(0), 0

        def read(matrix, piece):
            values = matrix[piece * length + jnp.arange(length, dtype=jnp.int32)]
            out[program] = jnp.sum(values.astype(F32)) + x[0, 0].astype(F32)  # x: or the next turn would not wait

        for matrix, count in zip(matrices, counts):
            here = (program >= start) & (program < start + count)
            pl.when(here)(partial(read, matrix, program - start))
            start += count

    params = CompilerParams(num_warps=8, num_stages=1)
    out_shape, flat = jax.ShapeDtypeStruct((sum(counts),), F32), [matrix.reshape(-1) for matrix in w]
    return launch(kernel, "read_only", sum(counts), out_shape, params, not ON_GPU, x, *flat)


def layer(triton, options, x, w, others):
    q, k, v, o, gate, up, router, shared_gate, down = w
    norm, *biases = others
    module = pallas_triton if triton else reference

    def norm_sum(x, *addends):
        return module.add_norm(x, norm, EPS, *addends, *[None] * (3 - len(addends)), **options)

    heads = project(triton, options, norm_sum(x)[1], (q, k, v), biases)
    x, m = norm_sum(x, project_parts(triton, options, heads[0] + heads[1] + heads[2], (o,), ()))
    weights, ids, factor = route(triton, options, m, (router, shared_gate), ())
    h = gated(triton, options, m, (gate, up), ())
    routed = m.astype(F32)[:, None], weights[:, :1] + (ids < 0)[:, :1]  # as if one expert returned m
    return norm_sum(x, project_parts(triton, options, h, (down,), ()), factor, routed)[0]


BF16, F32 = jnp.bfloat16, jnp.float32
NORM = ((D,), BF16)
BIASES = (((N,), BF16),) * 3
ROUTER = (D, E), (D,)

OPS = [
    Op(
        name="layer",
        call=layer,
        weights=((D, N), (D, N), (D, N), (N, D), (D, F), (D, F), *ROUTER, (F, D)),
        width=D,
        others=lambda T: (NORM, *BIASES),
        turns=3,
        chained=True,
    ),
    Op(name="route", call=route, weights=ROUTER, width=D, sets=192, turns=1),
    Op(
        name="gate, up",
        call=gated,
        weights=((D, F), (D, F)),
        width=D,
        cuts="64,64,1,4,6 64,128,1,4,4 64,32,1,4,10 32,64,1,2,6",
    ),
    Op(
        name="down",
        call=project_parts,
        weights=((F, D),),
        width=F,
        cuts="64,128,4,4,4 64,128,4,4,6 64,64,8,4,6 128,64,8,4,6",
    ),
    Op(
        name="qkv",
        call=project,
        weights=((D, N),) * 3,
        width=D,
        others=lambda T: BIASES,
        cuts="64,128,1,4,6 64,64,1,4,8 32,128,1,2,6",
    ),
    Op(
        name="o",
        call=project_parts,
        weights=((N, D),),
        width=N,
        sets=16,
        cuts="64,128,4,4,4 64,64,8,4,5 32,128,4,2,5",
    ),
    Op(
        name="sum, norm",
        call=add_norm,
        weights=((D,),),
        width=D,
        others=lambda T: (((4, T, D), F32), ((T, 1), F32)),
        sets=96,
        turns=1,
    ),
    Op(name="head", call=partial(logits, False), weights=((D, V),), width=D, sets=2, cuts="128,128,1,4,3 64,64,1,1,6"),
    Op(name="tied head", call=partial(logits, True), weights=((V, D),), width=D, sets=2, cuts="32,256,1,4,3"),
]


def parse_cut(text: str) -> Cut:
    names = "columns", "depth", "stretches", "num_warps", "num_stages"
    return Cut(**dict(zip(names, map(int, text.split(",")))))


@dataclass(frozen=True, kw_only=True)
class Job:
    """One figure: ``cut`` is "xla", "read", "" for the kernel as it chooses, or a cut of the sweep."""

    op: Op
    tokens: int
    cut: str

    @property
    def name(self) -> str:
        return f"{self.op.name} {self.tokens} {self.how}"

    @property
    def how(self) -> str:
        return self.cut if self.cut in ("xla", "read") else f"triton {self.cut}".strip()

    @property
    def sets(self) -> int:
        return self.op.sets if ON_GPU else 2

    @property
    def turns(self) -> int:
        return self.op.turns if ON_GPU else 1

    def one(self, x, w, others):
        if self.cut == "xla":
            return self.op.call(False, {}, x, w, others)
        if self.cut == "read":
            return read_only(x, w)
        return self.op.call(
            True, {"interpret": not ON_GPU} | ({"cut": parse_cut(self.cut)} if self.cut else {}), x, w, others
        )

    def loop(self, x, sets, others):
        traced = jax.jit(self.one)

        def body(_, x):
            for _ in range(self.turns):
                if self.op.chained:
                    for w in sets:
                        x = traced(x, w, others)
                    continue
                outs = lax.optimization_barrier([traced(x, w, others) for w in sets])  # whole, not just what is read
                seen = sum(out.reshape(-1)[0].astype(jnp.float32) for out in jax.tree.leaves(outs))
                x = jnp.where(seen == 12345.0, 0, x)  # the next turn needs this one
            return x

        return lax.fori_loop(0, ROUNDS, body, x)

    def shapes(self):
        x = jax.ShapeDtypeStruct((self.tokens, self.op.width), BF16)
        w = tuple(jax.ShapeDtypeStruct(s, BF16) for s in self.op.weights)
        return x, w, tuple(jax.ShapeDtypeStruct(*s) for s in self.op.others(self.tokens))

    def compile(self):
        x, w, others = self.shapes()
        loop = jax.jit(self.loop).lower(x, (w,) * self.sets, others).compile()
        return loop, jax.jit(self.one).lower(x, w, others).compile()


def cuts(op: Op, sweep: bool) -> list[str]:
    """Returns how an operation is timed: see ``Job``."""
    streams = op.name in ("gate, up", "down", "qkv", "o")
    return ["xla", *(["read"] if streams else []), "", *(op.cuts.split() if sweep else [])]


def random(shapes, seed: int) -> tuple[jax.Array, ...]:
    """Returns normal numbers, those of matrices divided by the root of their rows."""
    keys = jax.random.split(jax.random.key(seed, impl="rbg" if ON_GPU else "threefry2x32"), max(1, len(shapes)))
    return tuple(
        (jax.random.normal(key, s.shape, s.dtype) * s.shape[0] ** -0.5).astype(s.dtype) for key, s in zip(keys, shapes)
    )


def added(out):
    """Returns the sum of products that are in parts, of which the definition has one."""
    return out.sum(0) if getattr(out, "ndim", 0) == 3 else out


def relative_error(out, ref) -> float:
    pairs = [[np.asarray(a, np.float64) for a in pair] for pair in zip(jax.tree.leaves(out), jax.tree.leaves(ref))]
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=80, help="start no case after this long")
    parser.add_argument("--only", default="", help="cases whose name this regular expression finds, and XLA's")
    parser.add_argument("--tokens", default="1,4,16", help="numbers of rows")
    parser.add_argument("--sweep", action="store_true", help="other program sizes, too")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kernels_dense.jsonl")
    options = parser.parse_args()
    start, results = time.perf_counter(), Results(options.out)
    jobs = [
        Job(op=op, tokens=tokens, cut=cut)
        for op in OPS
        for tokens in map(int, options.tokens.split(","))
        for cut in cuts(op, options.sweep)
    ]
    jobs = [job for job in jobs if job.cut == "xla" or re.search(options.only, job.name)]
    jobs = [job for job in jobs if any(other.op is job.op and other.cut != "xla" for other in jobs)]
    with ThreadPoolExecutor(15 if ON_GPU else 2) as pool:
        compiled = [pool.submit(job.compile) for job in jobs]
        wait(compiled, timeout=0.6 * options.seconds)
        pool.shutdown(cancel_futures=True)  # nothing may compile beside a timing
    print(f"{len(jobs)} cases compiled after {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{'operation, tokens':58}{'us':>9}{'GB/s':>7}{'%':>5}{'error':>9}", flush=True)
    sets_of, sets, failed = None, None, False
    for job, future in zip(jobs, compiled):
        if future.cancelled() or time.perf_counter() - start > options.seconds:
            print("out of time for", job.name)
            continue
        try:
            loop, once = future.result()
            x, w, others = job.shapes()
            if sets_of is not job.op:
                sets_of, sets = job.op, None  # frees the last ones first
                sets = tuple(random(w, seed) for seed in range(job.sets))
            x, others = random((x,), 98)[0], random(others, 99)
            out = once(x, sets[0], others)
            if job.cut == "xla":
                defined = out
            error = 0.0 if job.cut == "read" else relative_error(added(out), added(defined))
            seconds = []
            for _ in range(23 if ON_GPU else 1):
                begin = time.perf_counter()
                jax.block_until_ready(loop(x, sets, others))
                seconds.append(time.perf_counter() - begin)
        except Exception as exception:  # one bad program size must not lose the rest
            print("FAILED", job.name, repr(exception)[:150].replace("\n", " "), flush=True)
            failed = True
            continue
        failed |= not error < 2e-2
        us = statistics.median(seconds[2 if ON_GPU else 0 :]) / (ROUNDS * job.turns * job.sets) * 1e6
        rate = sum(2 * int(np.prod(shape)) for shape in job.op.weights) / us / 1e3
        print(f"{job.name:58}{us:>9.2f}{rate:>7.0f}{100 * rate / CEILING_GB_S:>5.0f}{error:>9.1e}", flush=True)
        if ON_GPU:
            record = {"what": job.op.name, "tokens": job.tokens, "how": job.how, "us": us, "gb_s": rate, "error": error}
            append_result(results, "kernels_dense", record)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
