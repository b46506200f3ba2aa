# SPDX-License-Identifier: Apache-2.0
"""Fills the table of block sizes with what is fastest on the GPU at hand.

    python benchmarks/tune.py [--only REGEX] [--seconds 80] [--table FILE.py] [--out FILE.jsonl]

Each kernel that reads the table is timed on each model's shapes, with the heuristic's sizes and with a few around them:
the routed experts of a decode step at 3, 4 and 5 bits, for one token and for a batch; those of a prefill chunk at 4
and 8 bits. Programs are compiled side by side, most important first, until two thirds of the time are over; then each
is timed by JAX's profiler, kernels alone, in turn and several times. Sizes enter the table if they take 3 % less than
the heuristic's, by the geometric mean over tokens and bitwidths: less is noise. A block has one entry for all numbers
of tokens: the order of a kernel's sums may follow from its sizes. Entries of other devices are kept, and those of
shapes that time did not suffice for.
"""

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import kernels_prefill as prefill
from kernels_inputs import CASES, Inputs, kernel_times, lower_layer, make_inputs, random_arena
from record import Results, append_result

from pallas_kernels import tuning_table
from pallas_kernels.bitplane import BlockLayout
from pallas_kernels.moe_ffn import grouped, pallas_triton
from pallas_kernels.moe_ffn.arg_specs import SPECS, MoESpec
from pallas_kernels.tuning import TABLE, device_kind, key

ROOT = Path(__file__).parents[1]
DECODE_TOKENS, DECODE_BITS = (1, 8, 16), (4, 3, 5)
PREFILL_BITS = 4, 8
PASSES = 2
GAIN = 0.97
"""What a candidate must take of the heuristic's time."""

Sizes = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A program with some blocks cut in some way.

    Attributes:
      name: of the program, with its tokens.
      sizes: by the table's key, those that are tried; None for the heuristic's.
      kernels: by the table's key, how the names of the kernels begin that it decides.
      calls: in a run.
      compiled: the program.
      args: by bitwidth.
      times: by (key, bitwidth), the microseconds a call of each pass.
    """

    name: str
    sizes: dict[str, Sizes | None]
    kernels: dict[str, str]
    calls: int
    compiled: Future
    args: Callable[[int], tuple]
    bits: tuple[int, ...]
    times: dict[tuple[str, int], list[float]] = field(default_factory=dict)


@contextmanager
def table_of(entries: dict[str, Sizes | None]) -> Iterator[None]:
    """What is traced meanwhile is cut as ``entries`` say, everything else by heuristic."""
    kept = TABLE.get(device_kind())
    TABLE[device_kind()] = {name: sizes for name, sizes in entries.items() if sizes}
    try:
        yield
    finally:
        TABLE.pop(device_kind())
        if kept is not None:
            TABLE[device_kind()] = kept


def decode_candidates(layout: BlockLayout) -> list[Sizes]:
    """Returns sizes with fewer and more registers a thread, and with half the warps a program."""
    with table_of({}):
        heuristic = pallas_triton.configure(layout)
    warps, registers = heuristic.num_warps, heuristic.registers
    around = [(warps, registers + 16), (warps, registers - 16), (warps, registers + 40), (warps // 2, registers)]
    return [{"num_warps": w, "registers": r} for w, r in around if w]


def decode_trials(spec: MoESpec, arena: jax.Array, tables: list, pool: ThreadPoolExecutor) -> Iterator[Trial]:
    """Yields the layer of a decode step; a program tries sizes of both blocks, whose kernels are timed apart."""
    gate_up, down = keys = [key(pallas_triton.KERNEL, (layout.rows, layout.columns)) for layout in spec.layouts]
    sizes = [[None, *decode_candidates(layout)] for layout in spec.layouts]
    todo = [make_inputs(case, arena, tables) for case in CASES if case.spec == spec and case.tokens in DECODE_TOKENS]

    def args(inputs: Inputs, bits: int) -> tuple:
        return inputs.args(np.full(spec.num_experts, bits))

    for n in range(max(map(len, sizes))):
        tried = {name: options[n] for name, options in zip(keys, sizes, strict=True) if n < len(options)}
        for inputs in todo:
            with table_of(tried):
                lowered = lower_layer(inputs)
            yield Trial(
                name=f"decode {inputs.case.name}",
                sizes=tried,
                kernels={gate_up: "gate_up", down: "down"},
                calls=inputs.calls,
                compiled=pool.submit(lowered.compile),
                args=partial(args, inputs),
                bits=DECODE_BITS,
            )


def prefill_trials(spec: MoESpec, arena: jax.Array, tables: list, pool: ThreadPoolExecutor) -> Iterator[Trial]:
    """Yields the products of a prefill chunk; both blocks have the same sizes."""
    name = key(grouped.KERNEL, (spec.layouts[0].rows, spec.layouts[0].columns))
    frames = [jnp.asarray(table) for table in tables]
    ids = [jnp.asarray(ids_TK) for ids_TK in prefill.draw_ids(spec)]
    rng = np.random.default_rng(3)
    m_TD = jnp.asarray(rng.standard_normal((prefill.TOKENS, spec.hidden_size)) * spec.hidden_size**-0.5, jnp.bfloat16)
    weights_TK = jnp.ones(ids[0].shape, jnp.float32)

    def args(sets, bits: int) -> tuple:
        return arena, frames, jnp.full((spec.num_experts, 2), bits, jnp.int32), m_TD, weights_TK, sets

    for sizes in (None, {"tile": 192}, {"tile": 256}, {"tile": 128}, {"plain_tile": 128}):
        with table_of({name: sizes}):
            rotate, call = prefill.calls_of(spec)["products"]
            sets = [jax.jit(rotate)(ids_TK) for ids_TK in ids]
            lowered = prefill.loop(call).lower(*args(sets, spec.max_bits))
        yield Trial(
            name=f"prefill {spec.name} {prefill.TOKENS} tokens",
            sizes={name: sizes},
            kernels={name: ""},
            calls=prefill.ROUNDS * prefill.SETS,
            compiled=pool.submit(lowered.compile),
            args=partial(args, sets),
            bits=PREFILL_BITS,
        )


def lower_all(only: str, pool: ThreadPoolExecutor, go_on: Callable[[], bool]) -> list[Trial]:
    """Returns all trials, their programs lowered and given to ``pool``, as far as ``go_on`` says."""
    trials = []
    for spec in SPECS.values():
        memory = None
        for what, make in (("decode", decode_trials), ("prefill", prefill_trials)):
            if not re.search(only, f"{what} {spec.name}"):
                continue
            if not go_on():
                print(f"out of time for {what} {spec.name}", flush=True)
                continue
            memory = memory or random_arena(spec)
            trials += make(spec, *memory, pool)
    return trials


def time_once(trial: Trial) -> None:
    """Adds to the trial's times, and prints them."""
    for bits in trial.bits:
        times = kernel_times(trial.compiled.result(), trial.args(bits), trial.calls)
        for name in trial.sizes:
            us = sum(us for kernel, us in times.items() if kernel.startswith(trial.kernels[name]))
            trial.times.setdefault((name, bits), []).append(us)
    for name, sizes in trial.sizes.items():
        shown = ", ".join(f"{bits} bits {trial.times[name, bits][-1]:.1f} us" for bits in trial.bits)
        print(f"{trial.name:38} {name:28} {f'{sizes}' if sizes else 'heuristic':32} {shown}", flush=True)


def record(trial: Trial, results: Results) -> None:
    """Appends each median of the passes to the results, with the least and the most."""
    for (name, bits), us in trial.times.items():
        about = {"program": trial.name, "kernel": name, "sizes": trial.sizes[name] or "heuristic", "bits": bits}
        times = {"us": statistics.median(us), "least_us": min(us), "most_us": max(us), "passes": len(us)}
        append_result(results, "tune", about | {what: round(value, 2) for what, value in times.items()})


def fastest(trials: list[Trial]) -> dict[str, tuple[Sizes, float]]:
    """Returns by key the fastest sizes, none for the heuristic's, and what the best of the others take of its time."""
    times: dict[str, dict[tuple, dict]] = {}  # key -> sizes, () for the heuristic's -> (program, bitwidth) -> us
    for trial in trials:
        for (name, bits), passes in trial.times.items():
            sizes = tuple((trial.sizes[name] or {}).items())
            times.setdefault(name, {}).setdefault(sizes, {})[trial.name, bits] = statistics.median(passes)
    found = {}
    for name, by_sizes in times.items():
        heuristic = by_sizes.pop((), {})
        ratios = {
            sizes: statistics.geometric_mean(us / heuristic[case] for case, us in cases.items())
            for sizes, cases in by_sizes.items()
            if cases.keys() == heuristic.keys()
        }
        if ratios:
            best = min(ratios, key=ratios.get)
            found[name] = dict(best) if ratios[best] < GAIN else {}, ratios[best]
    return found


def write_table(path: Path, device: str, found: dict[str, Sizes]) -> None:
    """Writes the table with what was found on ``device`` in the place of its entries for the same keys."""
    entries = {name: sizes for name, sizes in TABLE.get(device, {}).items() if name not in found}
    entries |= {name: sizes for name, sizes in found.items() if sizes}
    lines = []
    for each, kept in (TABLE | {device: entries}).items():
        if kept:
            lines += [f"    {json.dumps(each)}: {{"]
            lines += [f"        {json.dumps(name)}: {json.dumps(sizes)}," for name, sizes in kept.items()]
            lines += ["    },"]
    head = Path(tuning_table.__file__).read_text().split("TABLE")[0]
    path.write_text("\n".join([f"{head}TABLE: dict[str, dict[str, dict[str, int]]] = {{", *lines, "}\n"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="what this regular expression finds, as in 'decode qwen1.5-moe'")
    parser.add_argument("--seconds", type=float, default=80, help="start no timing after this long")
    parser.add_argument("--table", type=Path, default=ROOT / "pallas_kernels" / "tuning_table.py")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "tune.jsonl")
    options = parser.parse_args()
    if jax.devices()[0].platform != "gpu":
        print("benchmarks/tune.py: no GPU; nothing here can be timed", file=sys.stderr)
        return 2
    start, results = time.perf_counter(), Results(options.out)

    def seconds_left() -> float:
        return options.seconds - (time.perf_counter() - start)

    with ThreadPoolExecutor(14) as pool:
        trials = lower_all(options.only, pool, lambda: seconds_left() > options.seconds / 3)
        print(f"{len(trials)} programs lowered after {time.perf_counter() - start:.0f} s", flush=True)
        wait([trial.compiled for trial in trials], timeout=max(0, seconds_left() - options.seconds / 3))
        pool.shutdown(cancel_futures=True)  # nothing may compile beside a timing
    ready = [trial for trial in trials if not trial.compiled.cancelled()]
    print(f"{len(ready)} of them compiled after {time.perf_counter() - start:.0f} s", flush=True)
    for number in range(PASSES):
        for trial in list(ready):
            if seconds_left() < 0:
                break
            try:
                time_once(trial)
            except Exception as error:  # sizes that do not compile must not lose the rest
                print("FAILED", trial.name, trial.sizes, repr(error)[:200], flush=True)
                ready.remove(trial)
        print(f"pass {number + 1} of {PASSES} after {time.perf_counter() - start:.0f} s", flush=True)
    timed = [trial for trial in ready if len(trial.times) == len(trial.sizes) * len(trial.bits)]
    for trial in timed:
        record(trial, results)
    found = fastest(timed)
    for name, (sizes, ratio) in found.items():
        print(f"{name}: the best of the others takes {ratio:.3f} of the heuristic's time: {sizes or 'heuristic'}")
        append_result(results, "tune", {"kernel": name, "chosen": sizes or "heuristic", "ratio": round(ratio, 4)})
    write_table(options.table, device_kind(), {name: sizes for name, (sizes, _) in found.items()})
    print(f"wrote {options.table}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
