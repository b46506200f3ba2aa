# SPDX-License-Identifier: Apache-2.0
"""Times attention, the KV write and frame movement beside the device's copy rate, all in one run.

    python benchmarks/kernels_attention.py [--sweep] [--only REGEX] [--seconds 80] [--out FILE.jsonl]

Each figure is the median of 21 runs of one jitted loop of dependent calls, divided by the calls. Attention reads four
sets of blocks in turn, frames move through two sets of places; each set of 16 rows is larger than the L2 cache, and all
lie in random order in an arena of more than 4 GiB. Everything is compiled first: a compilation beside a timing starves
its launches. Attention is held to the definition (``paged_attention/reference.py``) on the same cache. Decode is all of
it, with rope and the KV write, and counts the bytes of keys and values that its queries see, prefill its floating-point
operations (two products of causal length), moves the bytes read and written. ``--sweep`` also times other program
sizes. Without a GPU the kernels are interpreted on tiny shapes: a check of this script, not a timing.
"""

import argparse
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

from kernels_attention_jobs import ARENA_BYTES, ON_GPU, Job, make_jobs, random_arena, relative_error
from record import Results, append_result


def inputs(job: Job, arenas) -> tuple:
    return ((arenas[job.frame_words],) if job.frame_words else ()) + job.args


def compile_job(job: Job, arenas) -> list:
    """Returns the loop, compiled, and where there is one the operation and its definition."""
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs(job, arenas))
    loop = jax.jit(job.run, donate_argnums=0 if job.donates else ()).lower(*args).compile()
    return [loop, *(jax.jit(f).lower(*args[:4]).compile() for f in job.pair or ())]


def median_us(job: Job, run, arenas, repetitions: int) -> float:
    seconds = []
    for _ in range(2 + repetitions):
        args = inputs(job, arenas)
        start = time.perf_counter()
        out = jax.block_until_ready(run(*args))
        seconds.append(time.perf_counter() - start)
        if job.donates:
            arenas[job.frame_words] = out[0] if isinstance(out, tuple) else out
    return statistics.median(seconds[2:]) / job.calls * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=80, help="start no case after this long")
    parser.add_argument("--only", default="", help="cases whose name this regular expression finds, and the copy")
    parser.add_argument("--sweep", action="store_true", help="other program sizes, too")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kernels_attention.jsonl")
    options = parser.parse_args()
    results = Results(options.out)
    start = time.perf_counter()
    arenas = {frame_words: random_arena(frame_words) for frame_words in (4096, 2048)}
    todo = [job for job in make_jobs(arenas, options.sweep) if job.what == "copy" or re.search(options.only, job.name)]
    with ThreadPoolExecutor(14 if ON_GPU else 2) as pool:
        compiled = {job.name: pool.submit(compile_job, job, arenas) for job in todo}
        wait(compiled.values(), timeout=0.4 * options.seconds)
        pool.shutdown(cancel_futures=True)  # nothing may compile beside a timing
    print(f"{len(todo)} cases compiled after {time.perf_counter() - start:.0f} s; arenas of {ARENA_BYTES >> 20} MiB")
    print(f"{'operation':18}{'shape':42}{'us':>9}{'GB/s':>7}{'% copy':>7}{'TFLOP/s':>9}{'error':>9}  how", flush=True)
    copy_rate, failed = None, False
    for job in todo:
        if compiled[job.name].cancelled() or time.perf_counter() - start > options.seconds:
            print("out of time for", job.name)
            continue
        try:
            run, *pair = compiled[job.name].result()
            error = relative_error(*(f(*inputs(job, arenas)[:4]) for f in pair)) if pair else None
            us = median_us(job, run, arenas, 21 if ON_GPU else 1)
        except Exception as exception:  # one bad program size must not lose the rest
            print("FAILED", job.name, repr(exception)[:150].replace("\n", " "), flush=True)
            failed = True
            continue
        failed |= error is not None and not error < 1e-2
        rate, tflops = job.moved_bytes / us / 1e3, job.flops / us / 1e6
        copy_rate = copy_rate or rate
        print(
            f"{job.what:18}{job.shape:42}{us:>9.1f}{rate:>7.0f}{100 * rate / copy_rate:>7.0f}"
            f"{f'{tflops:.0f}' if job.flops else '':>9}{f'{error:.1e}' if error is not None else '':>9}  {job.how}",
            flush=True,
        )
        record = {"what": job.what, "shape": job.shape, "how": job.how, "us": us, "gb_s": rate, "copy_gb_s": copy_rate}
        if ON_GPU:
            append_result(results, "kernels_attention", record | {"tflops": tflops, "error": error})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
