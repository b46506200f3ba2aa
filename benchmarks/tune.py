# SPDX-License-Identifier: Apache-2.0
"""Fills the table of block sizes with what is fastest on the GPU at hand.

    python benchmarks/tune.py [--only REGEX] [--seconds 300] [--table pallas_kernels/tuning_table.py]

For each model's gate_up and down a few sizes around the heuristic's are timed in the whole layer, the other block by
heuristic, at 4 bits, for one token and for a batch, as soon as they are compiled; the least product of both times wins
if it is 2 % below the heuristic's. A block has one entry for all numbers of tokens, since the order of sums follows
from it. Entries of other devices are kept, and so are those of models that time did not suffice for.
"""

import argparse
import math
import pprint
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from kernels_inputs import CASES, lower_layer, make_inputs, random_arena, seconds_of

from pallas_kernels import tuning_table
from pallas_kernels.bitplane import BlockLayout
from pallas_kernels.moe_ffn.arg_specs import SPECS, MoESpec
from pallas_kernels.moe_ffn.pallas_triton import KERNEL, configure
from pallas_kernels.moe_ffn.slices import num_chunks
from pallas_kernels.tuning import TABLE, device_kind, key

ROOT = Path(__file__).parents[1]
BITS = 4
GAIN = 0.98
"""What a candidate must take of the heuristic's time: less is noise."""


def candidates(layout: BlockLayout) -> list[dict[str, int]]:
    """Returns sizes with twice and half the warps or a chunk more or less, with at most one chunk idle."""
    count, heuristic = num_chunks(layout), configure(layout)
    warps, chunks = heuristic.num_warps, heuristic.chunks
    around = [(2 * warps, -(-chunks // 2)), (warps, chunks - 1), (warps, chunks + 1), (warps // 2, chunks)]
    return [
        {"num_warps": w, "chunks": g}
        for w, g in around
        if w and 0 < g <= count and w * g <= count + 1 and (w, g) != (warps, chunks)
    ]


def tune(spec: MoESpec, entries: dict[str, dict[str, int]], until: float) -> None:
    """Adds to ``entries`` the sizes of the model's blocks that are faster than the heuristic's."""
    keys = [key(KERNEL, (layout.rows, layout.columns)) for layout in spec.layouts]
    before = {name: entries.pop(name, None) for name in keys}
    memory = random_arena(spec)
    inputs = [make_inputs(case, *memory) for case in CASES if case.spec == spec and case.tokens in (1, 8, 16)]
    todo = [(name, sizes) for name, block in zip(keys, spec.layouts, strict=True) for sizes in candidates(block)]

    def time_of(name, sizes) -> float:
        """The geometric mean of microseconds a call; the table is read while a layer is traced."""
        if sizes:
            entries[name] = sizes
        lowered = [lower_layer(each) for each in inputs]
        entries.pop(name, None)
        with ThreadPoolExecutor(len(lowered)) as pool:
            runs = [pool.submit(each.compile) for each in lowered]
            wait(runs)  # nothing may compile beside a timing
        args = [each.args(np.full(spec.num_experts, BITS)) for each in inputs]
        seconds = [seconds_of(run.result(), each_args) for run, each_args in zip(runs, args, strict=True)]
        times = [s / each.calls * 1e6 for s, each in zip(seconds, inputs, strict=True)]
        shown = ", ".join(f"{each.case.tokens} tokens {us:.1f} us" for each, us in zip(inputs, times, strict=True))
        print(f"{spec.name:14} {f'{name} {sizes}' if sizes else 'heuristic'}: {shown}", flush=True)
        return math.prod(times) ** (1 / len(times))

    least = time_of("", None) * GAIN
    best = {}
    for name, sizes in todo:
        if time.perf_counter() > until:
            print(f"out of time at {name} {sizes}", flush=True)
            entries |= {name: sizes for name, sizes in before.items() if sizes}
            return
        us = time_of(name, sizes)
        if us < best.get(name, (least, None))[0]:
            best[name] = us, sizes
    entries |= {name: sizes for name, (_, sizes) in best.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="models whose name this regular expression finds")
    parser.add_argument("--seconds", type=float, default=300, help="start no timing after this long")
    parser.add_argument("--table", type=Path, default=ROOT / "pallas_kernels" / "tuning_table.py")
    options = parser.parse_args()
    if jax.devices()[0].platform != "gpu":
        print("benchmarks/tune.py: no GPU; nothing here can be timed", file=sys.stderr)
        return 2
    until = time.perf_counter() + options.seconds
    entries = TABLE.setdefault(device_kind(), {})
    for spec in SPECS.values():
        if re.search(options.only, spec.name) and time.perf_counter() < until:
            tune(spec, entries, until)
            head = Path(tuning_table.__file__).read_text().split("TABLE")[0]
            shown = pprint.pformat(TABLE, width=110)
            options.table.write_text(f"{head}TABLE: dict[str, dict[str, dict[str, int]]] = {shown}\n")
            print(f"wrote {options.table}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
