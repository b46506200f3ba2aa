# SPDX-License-Identifier: Apache-2.0
"""Compiles whole decode and prefill steps of a Qwen1.5-MoE-A2.7B-sized model for an H200 on a machine without a GPU.

    python benchmarks/aot_steps.py [--layers 24] [--batches 1 16] [--chunks 2048]

See ``aot_h200.py`` for what it needs. Prints the time, the temporaries, the launches of a layer, and each kernel's
registers and spills; fails if a kernel spills, a program copies its arena, or its temporaries exceed ``--temporaries``.
"""

import argparse
import re
import shutil
import sys
import time
from collections import Counter
from functools import partial

from aot_h200 import DUMP, compile_for_h200, resources

# isort: split
# JAX reads what aot_h200 sets when it is imported, so these imports stand below it.
import jax
import jax.numpy as jnp
from decode import FRAME_WORDS, abstract_model, qwen_moe_config

from pagedweight_jax.serving import steps

ARENA_BYTES = 9 << 30


def cases(layers: int, batches: list[int], chunks: list[int], implementation: str):
    """Yields (name, step, abstract arguments, which of them is donated)."""
    config, num_frames = qwen_moe_config(layers), ARENA_BYTES // (4 * FRAME_WORDS)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    for rows in batches:
        weights, state = abstract_model(config, rows, 4096, num_frames)
        step = partial(steps.decode_loop.__wrapped__, num_steps=8, implementation=implementation)
        yield f"decode, {rows} rows", step, (weights, state)
    for chunk in chunks:
        weights, state = abstract_model(config, 16, 4096, num_frames)
        step = partial(steps.prefill_step.__wrapped__, implementation=implementation)
        tokens = jax.ShapeDtypeStruct((chunk,), jnp.int32)
        yield f"prefill, {chunk} tokens", step, (weights, state, scalar, tokens, scalar, scalar)


def launches(hlo: str) -> Counter:
    """Returns how often each kernel is launched: per computation of the program that is called or looped."""
    count = Counter()
    for line in hlo.splitlines():
        found = re.search(r"%?([\w.-]+) = .*? (fusion|custom-call|copy|sort|dynamic-update-slice|reduce|scatter|"
                          r"convolution|dot|copy-start)\(", line)
        if found and not line.startswith("%"):
            name, kind = found.groups()
            named = re.search(r'name = "?([\w.]+)|op_name="[^"]*?/([\w.]+)"', line) if kind == "custom-call" else None
            count[(kind, next(g for g in named.groups() if g) if named else re.sub(r"[.\d]+$", "", name))] += 1
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--chunks", type=int, nargs="*", default=[2048])
    parser.add_argument("--implementation", default="triton")
    parser.add_argument("--hlo", help="write each program's optimized HLO beside this prefix")
    arguments = parser.parse_args()
    failed = False
    print(f"jax {jax.__version__}, H200, {arguments.layers} layers, arena of {ARENA_BYTES >> 30} GiB")
    for name, step, args in cases(arguments.layers, arguments.batches, arguments.chunks, arguments.implementation):
        start = time.perf_counter()
        compiled, files = compile_for_h200(step, *args, donate_argnums=1)
        seconds = time.perf_counter() - start
        memory = compiled.memory_analysis()
        copied = memory.temp_size_in_bytes > ARENA_BYTES // 2 or memory.alias_size_in_bytes < ARENA_BYTES
        print(f"{name}: {seconds:.1f} s, temporaries {memory.temp_size_in_bytes / 1e6:.1f} MB, aliased "
              f"{memory.alias_size_in_bytes / 1e9:.2f} GB{', COPIES THE ARENA' if copied else ''}", flush=True)
        failed |= copied
        hlo = compiled.as_text()
        if arguments.hlo:
            with open(f"{arguments.hlo}{name.replace(', ', '_').replace(' ', '_')}.txt", "w") as file:
                file.write(hlo)
        if shutil.which("ptxas"):
            kernels = {}
            for file in files:
                kernels |= resources(file) if file.stat().st_size else {}
            for kernel, (registers, spilled) in sorted(kernels.items()):
                if spilled:
                    print(f"    {kernel}: {registers} registers, {spilled} bytes spilled")
    shutil.rmtree(DUMP, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
