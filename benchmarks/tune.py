# SPDX-License-Identifier: Apache-2.0
"""Fills the table of block sizes with what is fastest on the GPU at hand.

    python benchmarks/tune.py [--only REGEX] [--seconds 300] [--table pallas_kernels/tuning_table.py]

For each model's gate_up and down every candidate is timed in the whole layer, the other block by heuristic, at 4 and 3
bits, for one token and for a batch; the least product of times wins if it is 2 % below the heuristic's. A block has one
entry for all numbers of tokens, since the order of sums follows from it. Entries of other devices are kept.
"""

import argparse
import math
import pprint
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
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
BITS = 4, 3
GAIN = 0.98
"""What a candidate must take of the heuristic's time: less is noise."""


def candidates(layout: BlockLayout) -> list[dict[str, int]]:
    """Returns sizes whose programs have few idle warps and, by what they hold, few spills; not the heuristic's."""
    count, heuristic = num_chunks(layout), vars(configure(layout))
    found = [
        {"num_warps": num_warps, "chunks": chunks, "registers": registers}
        for num_warps, chunks in ((1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (2, 3), (2, 4), (4, 1), (4, 2))
        for registers in (112, 128, 168, 255)
        if num_warps * chunks <= count + 1 and 48 <= registers - 32 * chunks <= 128
    ]
    return [sizes for sizes in found if sizes != heuristic]


def plan(spec: MoESpec) -> list[tuple[str, dict[str, int]]]:
    """Returns (key, sizes) of everything to time besides the heuristic."""
    keys = [key(KERNEL, (layout.rows, layout.columns)) for layout in spec.layouts]
    return [(name, sizes) for name, layout in zip(keys, spec.layouts, strict=True) for sizes in candidates(layout)]


def tune(spec: MoESpec, entries: dict[str, dict[str, int]], until: float) -> None:
    """Adds to ``entries`` the sizes of the model's blocks that are faster than the heuristic's."""
    for layout in spec.layouts:
        entries.pop(key(KERNEL, (layout.rows, layout.columns)), None)
    memory = random_arena(spec)
    inputs = [make_inputs(case, *memory) for case in CASES if case.spec == spec and case.tokens <= 16]
    todo, running = [None, *plan(spec)], {}
    with ThreadPoolExecutor(12) as pool:  # the table is read while a layer is traced, here; compiling is free of it
        for tried in todo:
            if tried:
                entries[tried[0]] = tried[1]
            running[todo.index(tried)] = [pool.submit(lower_layer(each).compile) for each in inputs]
            if tried:
                del entries[tried[0]]
    times = {}
    for index, compiled in running.items():
        if time.perf_counter() > until:
            print("out of time at", todo[index])
            break
        product = 1.0
        for each, run in zip(inputs, compiled, strict=True):
            for bits in BITS:
                args = each.args(np.full(spec.num_experts, bits))
                product *= seconds_of(run.result(), args) / each.calls * 1e6
        times[index] = product ** (1 / len(BITS) / len(inputs))
        print(f"{spec.name:14} {todo[index] or 'heuristic'}: {times[index]:.1f} us", flush=True)
    for name in {tried[0] for tried in todo if tried}:
        timed = [(us, todo[index][1]) for index, us in times.items() if todo[index] and todo[index][0] == name]
        us, sizes = min(timed, key=lambda pair: pair[0], default=(math.inf, None))
        if us < GAIN * times.get(0, 0.0):
            entries[name] = sizes


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
        if re.search(options.only, spec.name):
            tune(spec, entries, until)
    head = Path(tuning_table.__file__).read_text().split("TABLE")[0]
    shown = pprint.pformat(TABLE, width=110)
    options.table.write_text(f"{head}TABLE: dict[str, dict[str, dict[str, int]]] = {shown}\n")
    print(f"wrote {options.table}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
