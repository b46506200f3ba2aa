# SPDX-License-Identifier: Apache-2.0
"""Compiles whole decode and prefill steps of a Qwen1.5-MoE-A2.7B-sized model for an H200 on a machine without a GPU.

    python benchmarks/aot_steps.py [--layers 24] [--batches 1 16] [--chunks 2048] [--hlo PREFIX]

See ``aot_h200.py`` for what it needs. The arena is larger than 2^32 bytes. Prints the time to compile, the temporaries,
and how often a layer launches which kernel; fails if a kernel spills more than a few registers or takes more shared
memory than there is (``ptxas`` says so), or if a program copies its arena.
"""

import argparse
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from aot_h200 import DUMP, SPILLED_BYTES, compile_for_h200, resources

# isort: split
# JAX reads what aot_h200 sets when it is imported, so these imports stand below it.
import jax
import jax.numpy as jnp
from random_checkpoint import qwen_moe_config
from random_model import FRAME_WORDS, abstract_model

from pagedweight_jax.serving import steps

ARENA_BYTES = 9 << 30
MOST_TEMPORARY_SHARE = 0.1
"""Of the arena; a copy of it would be more."""

LAUNCH = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = .*?\s(?:fusion|custom-call|copy|sort|reduce|dot)\(")


def cases(layers: int, batches: list[int], chunks: list[int], implementation: str) -> Iterator[tuple]:
    """Yields (name, step, its compiler options, abstract arguments), the state the second of them."""
    config, num_frames = qwen_moe_config(layers), ARENA_BYTES // (4 * FRAME_WORDS)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    for rows in batches:
        step = partial(steps.decode_loop.__wrapped__, num_steps=8, implementation=implementation)
        yield f"decode, {rows} rows", step, steps.COMPILER_OPTIONS, abstract_model(config, rows, 4096, num_frames)
    for chunk in chunks:
        step = partial(steps.prefill_step.__wrapped__, implementation=implementation)
        tokens = jax.ShapeDtypeStruct((chunk,), jnp.int32)
        yield (
            f"prefill, {chunk} tokens",
            step,
            None,
            (*abstract_model(config, 16, 4096, num_frames), scalar, tokens, scalar, scalar),
        )


def launches(hlo: str) -> Counter:
    """Returns how often the step's computation, the one with the most kernels of ours, launches which kernel."""
    bodies = [block for block in hlo.split("\n\n") if "custom-call(" in block]
    counts: list[Counter] = [Counter()]
    for body in bodies:
        count: Counter = Counter()
        for line in body.splitlines():
            if found := LAUNCH.match(line):
                ours = re.search(r"/(\w+)/pallas_call", line)
                count[ours[1] if ours else f"XLA {re.sub(r'[.0-9]+$', '', found[1])}"] += 1
        counts.append(count)
    return max(counts, key=lambda count: sum(n for name, n in count.items() if not name.startswith("XLA")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--chunks", type=int, nargs="*", default=[2048])
    parser.add_argument("--implementation", default="triton")
    parser.add_argument("--hlo", help="write each program's optimized HLO to files of this prefix")
    arguments = parser.parse_args()
    failed = False
    print(f"jax {jax.__version__}, H200, {arguments.layers} layers, arena of {ARENA_BYTES >> 30} GiB")
    todo = cases(arguments.layers, arguments.batches, arguments.chunks, arguments.implementation)
    for name, step, options, args in todo:
        began = time.perf_counter()
        compiled, files = compile_for_h200(step, *args, donate_argnums=1, compiler_options=options)
        seconds = time.perf_counter() - began
        memory, hlo = compiled.memory_analysis(), compiled.as_text()
        most_bytes = MOST_TEMPORARY_SHARE * ARENA_BYTES
        copied = memory.alias_size_in_bytes < ARENA_BYTES or memory.temp_size_in_bytes > most_bytes
        print(
            f"{name}: compiled in {seconds:.1f} s, temporaries {memory.temp_size_in_bytes / 1e6:.1f} MB"
            f"{', COPIES THE ARENA' if copied else ''}",
            flush=True,
        )
        count = launches(hlo)
        print(f"    {sum(count.values())} launches, {sum(count.values()) / arguments.layers:.1f} a layer: ", end="")
        print(", ".join(f"{n} {kernel}" for kernel, n in count.most_common()))
        if arguments.hlo:
            Path(f"{arguments.hlo}{name.replace(', ', '_').replace(' ', '_')}.txt").write_text(hlo)
        spilling = []
        if shutil.which("ptxas"):
            kernels = {}
            for file in files:
                kernels |= resources(file) if file.stat().st_size else {}  # some modules have no kernel
            spilling = [f"{kernel} {spilled}" for kernel, (_, spilled) in kernels.items() if spilled > SPILLED_BYTES]
            some = [f"{kernel} {spilled}" for kernel, (_, spilled) in kernels.items() if spilled]
            print(f"    {len(kernels)} kernels; bytes spilled: {', '.join(some) or 'none'}")
        failed |= copied or bool(spilling)
    shutil.rmtree(DUMP, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
