# SPDX-License-Identifier: Apache-2.0
"""What a boundary's planning costs on the host, with everything on: buckets, floors, caps, residual heads, six stages.

Signals, sensitivities and present bits are random; sizes are those of Qwen1.5-MoE's blocks. ``quiet`` is a boundary
without pressure, at which the stages' plans are only made ready; the others must release one KV block, a quarter or
nearly all of what there is. ``no policy`` is a checkpoint as it is converted. ``reload`` takes what one boundary may
reload. The figures are the median and the fastest.

    python benchmarks/planner.py
    python benchmarks/planner.py --requests 64 --repeats 10
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from record import Results, append_result

from pagedweight_jax.config import PlannerConfig
from pagedweight_jax.planning.calibration import Calibration, ResidualHeads
from pagedweight_jax.planning.observation import KVPressure, Observation
from pagedweight_jax.planning.planner import plan_reload, plan_step, releasable_bytes
from pagedweight_jax.planning.policy import NEUTRAL_POLICY, Policy
from pagedweight_jax.planning.queue import PlanQueue
from pagedweight_jax.planning.scoring import expert_buckets, score_damage
from pagedweight_jax.planning.signals import RequestSignals, observe

SHAPES = {"Mixtral": (32, 8), "Qwen1.5-MoE": (24, 60), "Gemma 4": (30, 128), "large": (49, 256)}
MIN_BITS, MAX_BITS = 3, 8
BYTES_UQ = np.array([[2.3, 3.1, 4.0, 5.1, 6.5, 8.9], [1.2, 1.6, 2.1, 2.8, 3.7, 5.4]]) * 2.0**20
BLOCK_BYTES = 8 << 20
POLICY = Policy(
    edges=(0.5, 1.5, 3.0),
    multipliers=(0.5, 1.0, 2.0, 4.0),
    floors=(3, 4, 4, 5),
    depth_caps=(4, 3, 2, 1),
    stages=(0, 1, 2),
)
CONFIG = PlannerConfig(low_watermark_blocks=0, high_watermark_blocks=0)


def draw_signals(rng: np.random.Generator, shape_LE: tuple[int, int]) -> RequestSignals:
    mass_LE = rng.gamma(0.3, size=shape_LE) * (rng.random(shape_LE) > 0.3)
    norm_LEU = mass_LE[..., None] * rng.lognormal(size=(*shape_LE, 2))
    square_LEU = norm_LEU * rng.lognormal(size=norm_LEU.shape)
    return RequestSignals(mass_LE=mass_LE, norm_LEU=norm_LEU, square_LEU=square_LEU, max_LEU=norm_LEU, tokens=500.0)


def draw_calibration(rng: np.random.Generator, shape_LE: tuple[int, int]) -> Calibration:
    widths = MAX_BITS - MIN_BITS + 1
    mass_LE = rng.gamma(2.0, size=shape_LE)
    shape_UR = (2, widths - 1)
    heads = ResidualHeads(
        weight_URX=rng.normal(size=(*shape_UR, 6)),
        intercept_UR=rng.normal(size=shape_UR),
        confidence_UR=rng.random(shape_UR),
        low_UR=np.full(shape_UR, -2.0),
        high_UR=np.full(shape_UR, 2.0),
    )
    return Calibration(
        sensitivity_LEUQ=rng.lognormal(size=(*shape_LE, 2, widths)) * 4.0 ** -np.arange(widths),
        min_bits=MIN_BITS,
        max_bits=MAX_BITS,
        mass_LE=mass_LE / mass_LE.sum(-1, keepdims=True),
        features_LEUX=rng.lognormal(size=(*shape_LE, 2, 3)),
        heads=heads,
        policy=POLICY,
    )


def times_ms(function: Callable[[], object], repeats: int) -> dict[str, float]:
    """Returns the median and the fastest of the repeats; where others use the machine, only the fastest says much."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return {"median": statistics.median(seconds) * 1e3, "fastest": min(seconds) * 1e3}


def measure(shape_LE: tuple[int, int], num_requests: int, repeats: int) -> dict[str, dict[str, float]]:
    """Returns milliseconds by what was done."""
    rng = np.random.default_rng(0)
    calibration = draw_calibration(rng, shape_LE)
    requests = tuple(draw_signals(rng, shape_LE) for _ in range(num_requests))
    kv_blocks = tuple(int(n) for n in rng.integers(1, 100, num_requests))
    table = SimpleNamespace(
        desired_LEU=rng.integers(MIN_BITS, MAX_BITS + 1, (*shape_LE, 2)).astype(np.uint8),
        bytes_UQ=BYTES_UQ.astype(np.int64),
    )
    queue = PlanQueue.start(np.full(table.desired_LEU.shape, 7, np.uint8))

    def observation(free_blocks: int) -> Observation:
        kv = KVPressure(free_blocks=free_blocks, pending_blocks=0, releasing_blocks=0, block_bytes=BLOCK_BYTES)
        return Observation(boundary=0, kv=kv, requests=requests, kv_blocks=kv_blocks)

    releasable_blocks = releasable_bytes(table, calibration, queue, CONFIG) // BLOCK_BYTES
    wanted = {
        "quiet": 0,
        "one block": 1,
        "a quarter": releasable_blocks // 4,
        "nearly all": releasable_blocks * 9 // 10,
    }
    ample = observation(1000)
    planned, _ = plan_step(table, ample, calibration, queue, CONFIG)  # as every boundary but the first finds it
    cases = {}
    for name, num_blocks in wanted.items():
        seen = observation(1 - num_blocks)
        cases[name] = lambda seen=seen: plan_step(table, seen, calibration, planned, CONFIG)
    bare = replace(calibration, policy=NEUTRAL_POLICY, heads=None)
    some = observation(1 - wanted["a quarter"])
    bare_planned, _ = plan_step(table, ample, bare, queue, CONFIG)
    cases["a quarter, no policy"] = lambda: plan_step(table, some, bare, bare_planned, CONFIG)
    bucket_LE = expert_buckets(ample, calibration, POLICY)
    cases["reload"] = lambda: plan_reload(table, ample, calibration, planned, CONFIG)
    cases["of it buckets"] = lambda: expert_buckets(ample, calibration, POLICY)
    cases["of it damage"] = lambda: score_damage(ample, calibration, bucket_LE, planned.prior, CONFIG)
    cases["observe a request"] = lambda: observe(requests[0], requests[0], 8, 2048.0)
    return {name: times_ms(case, repeats) for name, case in cases.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--results", default="benchmarks/results/planner.jsonl")
    args = parser.parse_args()
    results = Results(Path(args.results))
    rows = {name: measure(shape_LE, args.requests, args.repeats) for name, shape_LE in SHAPES.items()}
    print(f"{'ms, ' + str(args.requests) + ' requests':22}" + "".join(f"{name:>14}" for name in SHAPES))
    print(f"{'blocks':22}" + "".join(f"{2 * L * E:>14}" for L, E in SHAPES.values()))
    for case in next(iter(rows.values())):
        print(
            f"{case:22}" + "".join(f"{row[case]['median']:>8.2f}{row[case]['fastest']:>6.2f}" for row in rows.values())
        )
    for name, (L, E) in SHAPES.items():
        record = {"model": name, "blocks": 2 * L * E, "requests": args.requests, "ms": rows[name]}
        append_result(results, "planner", record)


if __name__ == "__main__":
    main()
