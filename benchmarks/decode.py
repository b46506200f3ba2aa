# SPDX-License-Identifier: Apache-2.0
"""Times decode steps and a prefill chunk of a whole model of Qwen1.5-MoE-A2.7B's sizes on one GPU, beside its roofline.

    python benchmarks/decode.py [--layers 24] [--batches 1 4 16] [--chunk 2048] [--profile DIR]
    python benchmarks/decode.py --layers 12 --batches 8 --sums

Weights, pages and caches are random and made on the device. Every row has ``--context`` tokens in its cache; the
experts run at one bitwidth, from pages strewn over the arena. A call is ``decode_loop`` of ``--steps`` steps; calls
follow one another without waiting for the host, as the engine's do, and the time of a step is that of all calls over
their steps. The roofline counts bytes: dense weights and the head once, each page of a selected expert once, the cache
of all rows once, at the 4.3 TB/s of a device copy.

Under the profiler XLA launches kernels one after another, unless XLA_FLAGS holds
``--xla_enable_command_buffers_during_profiling=true``: then the trace shows what runs side by side.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from random_checkpoint import qwen_moe_config
from random_model import abstract_model, frame_counts, random_state, random_weights
from record import append_result

from pagedweight_jax.config import ModelConfig
from pagedweight_jax.models.weights import Weights
from pagedweight_jax.serving import steps
from pagedweight_jax.serving.ledger import tree_bytes
from pagedweight_jax.serving.state import DecodeState

COPY_BYTES_PER_SECOND = 4.3e12
PREFILL_CALLS = 3
SHOWN_KERNELS = 32
TARGETS = {1: 660, 4: 1650, 16: 3000, "prefill": 40_000}


decode, prefill = steps.decode_loop, steps.prefill_step


def step_bytes(weights: Weights, state: DecodeState, arguments, experts_used: float) -> dict[str, float]:
    """Returns the bytes that a decode step must read, by what they are."""
    config, geometry = weights.config, state.geometry
    rows, context, bits = state.lengths_B.shape[0], arguments.context, arguments.bits
    planes = bits * (geometry.gate_up.plane_words + geometry.down.plane_words)
    luts = sum(layout.lut_words(bits - 1) for layout in (geometry.gate_up, geometry.down))
    head_values = geometry.kv.num_kv_heads * geometry.kv.head_dim
    return {
        "dense": tree_bytes(weights) - weights.embed_VD.nbytes,
        "experts": config.num_sparse_layers * experts_used * 4 * (planes + luts),
        "kv": config.num_layers * rows * context * 2 * head_values * 2,
    }


def expected_experts(config: ModelConfig, rows: int) -> float:
    """Returns how many distinct experts ``rows`` tokens take on average where routing is uniform."""
    miss = 1 - config.num_experts_per_tok / config.num_experts
    return config.num_experts * (1 - miss**rows)


def timed(run, repetitions: int) -> float:
    """Returns the median of ``run``'s seconds after one call to warm up."""
    run()
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def profile_kernels(run, folder: str) -> tuple[dict[str, tuple[int, float]], float, float]:
    """Returns (name -> (launches, microseconds), busy and elapsed microseconds) of the kernels of ``run``."""
    from jax.profiler import ProfileData

    with jax.profiler.trace(folder):
        run()
    events = []
    for file in sorted(Path(folder).rglob("*.xplane.pb")):
        for plane in ProfileData.from_file(str(file)).planes:
            if plane.name.startswith("/device:GPU"):
                for line in plane.lines:
                    if line.name.startswith("Stream"):
                        events += [(e.start_ns, e.duration_ns, e.name) for e in line.events]
    kernels = defaultdict(lambda: [0, 0.0])
    for _, duration, name in events:
        kernels[name][0] += 1
        kernels[name][1] += duration / 1e3
    busy = sum(us for _, us in kernels.values())
    if not events:
        return {}, 0.0, 0.0
    elapsed = (max(start + duration for start, duration, _ in events) - min(e[0] for e in events)) / 1e3
    return {name: tuple(entry) for name, entry in kernels.items()}, busy, elapsed


def print_kernels(kernels, busy, elapsed, num_steps: int, num_layers: int) -> None:
    launches = sum(count for count, _ in kernels.values())
    print(
        f"  kernels: {launches / num_steps:.0f} a step, {launches / num_steps / num_layers:.1f} a layer; "
        f"busy {busy / num_steps:.0f} us of {elapsed / num_steps:.0f} us a step, "
        f"gaps {(elapsed - busy) / max(1, launches):.2f} us a kernel"
    )
    for name, (count, us) in sorted(kernels.items(), key=lambda item: -item[1][1])[:SHOWN_KERNELS]:
        print(f"    {us / num_steps:8.1f} us a step {count / num_steps:7.1f} x {us / count:7.2f} us  {name[:90]}")


@partial(jax.jit, static_argnames=("num_steps", "implementation"), donate_argnames="state")
def decode_without_sums(weights, state, num_steps, *, implementation):
    return steps.decode_loop(weights, state, num_steps, implementation=implementation)[:2]


def step_arguments(step, arguments) -> tuple:
    """Returns what a step takes beside weights and state."""
    if step is not steps.prefill_step:
        return (arguments.steps,)
    tokens_T = np.random.default_rng(4).integers(0, 1000, arguments.chunk).astype(np.int32)
    return np.int32(0), tokens_T, np.int32(arguments.chunk), np.int32(0)


class Case:
    """One model on the device and what is measured of it; every call starts from the same lengths."""

    def __init__(self, arguments, config: ModelConfig, weights: Weights, state: DecodeState, say):
        self.arguments, self.config, self.weights, self.state, self.say = arguments, config, weights, state, say
        self.rows = state.lengths_B.shape[0]
        self.calls = arguments.calls

    def decode(self, program) -> tuple:
        """Runs calls that follow one another without the host; returns the last one's results."""
        self.state = self.state.replace(lengths_B=jnp.full(self.rows, self.arguments.context, jnp.int32))
        for _ in range(self.calls):
            self.state, *results = program(self.weights, self.state)
        jax.block_until_ready(results)
        return results

    def prefill(self, program) -> None:
        row, tokens_T, *others = step_arguments(steps.prefill_step, self.arguments)
        for _ in range(PREFILL_CALLS):
            self.state = self.state.replace(lengths_B=jnp.zeros(self.rows, jnp.int32))
            self.state, *results = program(self.weights, self.state, row, tokens_T, *others)
        jax.block_until_ready(results)

    def time_decode(self, program) -> None:
        arguments, config = self.arguments, self.config
        num_steps = self.calls * arguments.steps
        _, sums = self.decode(program)
        used = float(np.mean(np.sum(np.asarray(sums.count_LE).sum(axis=0) > 0, axis=-1)))
        seconds = timed(lambda: self.decode(program), 5) / num_steps
        needed = step_bytes(self.weights, self.state, arguments, expected_experts(config, self.rows))
        share = sum(needed.values()) / COPY_BYTES_PER_SECOND / seconds
        self.say(
            f"batch {self.rows}: {self.rows / seconds:.0f} tokens/s (target {TARGETS.get(self.rows, 'none')}), "
            f"{1e3 * seconds:.3f} ms a step, {1e6 * seconds / config.num_layers:.1f} us a layer, "
            f"{100 * share:.0f} % of the roofline ("
            + ", ".join(f"{name} {count / 1e9:.2f} GB" for name, count in needed.items())
            + f"); {used:.0f} experts a layer used in a call"
        )
        record = {
            "tokens_per_second": self.rows / seconds,
            "step_ms": 1e3 * seconds,
            "roofline_share": share,
            "bytes": needed,
            "experts_used_in_a_call": used,
        }
        self.record("decode", program, record, lambda: self.decode(program), num_steps)

    def time_prefill(self, program) -> None:
        seconds = timed(lambda: self.prefill(program), 5) / PREFILL_CALLS
        tokens = self.arguments.chunk
        self.say(
            f"prefill of {tokens}: {tokens / seconds:.0f} tokens/s (target {TARGETS['prefill']}), "
            f"{1e3 * seconds:.2f} ms a chunk"
        )
        record = {"chunk": tokens, "tokens_per_second": tokens / seconds, "chunk_ms": 1e3 * seconds}
        self.record("prefill", program, record, lambda: self.prefill(program), PREFILL_CALLS)

    def compare_sums(self, with_sums, without) -> None:
        """Times the same step with and without its sums, in turn."""
        seconds: dict[str, list[float]] = {"with": [], "without": []}
        programs = {"with": with_sums, "without": without}
        for turn in range(2 + self.arguments.repetitions):
            for name in ("with", "without") if turn % 2 else ("without", "with"):
                began = time.perf_counter()
                self.decode(programs[name])
                seconds[name].append((time.perf_counter() - began) / (self.calls * self.arguments.steps))
        both = {name: np.array(values[2:]) for name, values in seconds.items()}
        shares = both["with"] / both["without"] - 1
        record = {f"step_ms_{name}": 1e3 * float(np.median(values)) for name, values in both.items()}
        record |= {
            "share": float(np.median(shares)),
            "standard_error": float(np.std(shares) / len(shares) ** 0.5),
            "repetitions": len(shares),
        }
        self.say(
            f"batch {self.rows}, {self.config.num_layers} layers: a step takes {record['step_ms_with']:.4f} ms with "
            f"sums, {record['step_ms_without']:.4f} ms without: {100 * record['share']:.2f} % "
            f"± {100 * record['standard_error']:.2f} % more"
        )
        self.record("sums", with_sums, record, lambda: self.decode(with_sums), self.calls * self.arguments.steps)

    def record(self, name: str, program, record: dict, run, num_steps: int) -> None:
        """Profiles ``run`` if asked, and appends the record."""
        arguments = self.arguments
        common = {
            "rows": self.rows,
            "layers": self.config.num_layers,
            "context": arguments.context,
            "bits": arguments.bits,
            "implementation": arguments.implementation,
            "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
        }
        if arguments.profile:
            kernels, busy_us, elapsed_us = profile_kernels(run, f"{arguments.profile}/{name}-{self.rows}")
            print_kernels(kernels, busy_us, elapsed_us, num_steps, self.config.num_layers)
            longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:SHOWN_KERNELS]
            record["kernels"] = {name: (n / num_steps, us / num_steps) for name, (n, us) in longest}
            record["busy_us"], record["elapsed_us"] = busy_us / num_steps, elapsed_us / num_steps
        append_result(arguments.out, name, common | record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a call")
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a prefill chunk to time, too")
    parser.add_argument("--sums", action="store_true", help="time steps with and without their sums, in turn")
    parser.add_argument("--calls", type=int, default=8, help="that follow one another")
    parser.add_argument("--repetitions", type=int, default=20, help="of the steps with and without sums")
    parser.add_argument("--implementation", default="triton")
    parser.add_argument("--profile", metavar="DIR", help="write traces there and print each kernel's share")
    parser.add_argument("--out", default="benchmarks/results/decode.jsonl")
    arguments = parser.parse_args()
    began = time.perf_counter()
    config = qwen_moe_config(arguments.layers)
    which = {"implementation": arguments.implementation}

    def say(text):
        print(f"[{time.perf_counter() - began:5.1f} s] {text}", flush=True)

    max_model_len = max(arguments.context + arguments.calls * arguments.steps, arguments.chunk)
    all_rows = arguments.batches or [1]  # with no batch, a prefill chunk alone
    jobs = {f"batch {rows}": (decode, rows) for rows in arguments.batches}
    if arguments.sums:
        jobs |= {f"batch {rows} without sums": (decode_without_sums, rows) for rows in arguments.batches}
    if arguments.chunk:
        jobs["prefill"] = (prefill, min(all_rows))

    def build(name):
        step, rows = jobs[name]
        counts, kv_frames = frame_counts(config, rows, max_model_len, arguments.bits)
        weights, state = abstract_model(config, rows, max_model_len, sum(counts) + kv_frames + 1)
        start = time.perf_counter()
        lowered = step.lower(weights, state, *step_arguments(step, arguments), **which)
        middle = time.perf_counter()
        compiled = lowered.compile(None if step is steps.prefill_step else steps.COMPILER_OPTIONS)
        say(f"{name}: lowered in {middle - start:.1f} s, compiled in {time.perf_counter() - middle:.1f} s")
        return compiled

    with ThreadPoolExecutor() as pool:
        programs = {name: pool.submit(build, name) for name in jobs}
        weights = random_weights(config)
        states = {
            rows: random_state(config, rows, arguments.context, max_model_len, arguments.bits)
            for rows in all_rows
        }
        jax.block_until_ready((weights, states))
        arenas = ", ".join(f"{state.arena_AW.nbytes / 1e9:.2f}" for state in states.values())
        say(f"built: {tree_bytes(weights) / 1e9:.2f} GB dense, arenas of {arenas} GB")
        programs = {name: program.result() for name, program in programs.items()}  # compiling disturbs timing
    for rows in all_rows:
        case = Case(arguments, config, weights, states.pop(rows), say)
        if arguments.sums:
            case.compare_sums(programs[f"batch {rows}"], programs[f"batch {rows} without sums"])
        elif arguments.batches:
            case.time_decode(programs[f"batch {rows}"])
        if arguments.chunk and rows == min(all_rows):
            case.time_prefill(programs["prefill"])


if __name__ == "__main__":
    main()
