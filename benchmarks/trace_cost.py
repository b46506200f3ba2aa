# SPDX-License-Identifier: Apache-2.0
"""What it costs a decode call to tell the planner what the experts saw: device time of the two programs that do it.

    python benchmarks/trace_cost.py --step-us 2000

``of_layers`` runs once a step, ``row_sums`` once a call. Each is timed alone, in a loop of many rounds on the device
whose own cost is taken off; inside a step XLA may fuse more of it with what is there anyway.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from record import append_result

from pagedweight_jax.serving.trace import ExpertTrace, row_sums

SHAPES = {"Qwen1.5-MoE": (24, 60, 4, 2048), "Mixtral": (32, 8, 2, 4096), "Gemma 4": (30, 128, 8, 2816)}
"""(L, E, K, D)."""

STEPS, ROUNDS = 8, 200


def draw_layers(shape: tuple[int, int, int, int], rows: int) -> list[tuple[jax.Array, ...]]:
    """Returns (ids_TK, weights_TK, m_TD, h_square_TK) of each layer for one step."""
    L, E, K, D = shape
    layers = []
    for key in jax.random.split(jax.random.key(0), L):
        ids_TK = jax.random.randint(key, (rows, K), 0, E)
        weights_TK = jax.random.uniform(key, (rows, K))
        layers.append((ids_TK, weights_TK, jax.random.normal(key, (rows, D), jnp.bfloat16), weights_TK + 1))
    return layers


def microseconds(program: Callable[[jax.Array], jax.Array]) -> float:
    """Returns device time of a round of ``program``, which takes and returns a scalar so that rounds follow in turn."""

    def looped(one_round):
        return jax.jit(lambda x: jax.lax.fori_loop(0, ROUNDS, lambda _, x: one_round(x), x)).lower(jnp.float32(0))

    def fastest(compiled) -> float:
        seconds = []
        for _ in range(6):
            start = time.perf_counter()
            compiled(jnp.float32(0)).block_until_ready()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    empty, full = (fastest(looped(one).compile()) for one in (lambda x: jnp.sin(x), lambda x: jnp.sin(program(x))))
    return 1e6 * (full - empty) / ROUNDS


def measure(shape: tuple[int, int, int, int], rows: int) -> dict[str, float]:
    """Returns microseconds a step and a call."""
    layers = draw_layers(shape, rows)
    step = ExpertTrace.of_layers(layers)
    call = jax.tree.map(lambda leaf: jnp.stack([leaf] * STEPS), step)

    def total(tree) -> jax.Array:
        """A scalar that needs all of it."""
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree)).astype(jnp.float32)

    def collect(x):
        moved = [(ids, weights + x, m + x.astype(m.dtype), h_square) for ids, weights, m, h_square in layers]
        return total(ExpertTrace.of_layers(moved)) * 1e-9

    def add_up(x):
        moved = ExpertTrace(
            ids_TLK=call.ids_TLK,
            weights_TLK=call.weights_TLK + x,
            x_square_TL=call.x_square_TL,
            h_square_TLK=call.h_square_TLK,
        )
        return total(row_sums(moved, shape[1])) * 1e-9

    return {"of_layers": microseconds(collect), "row_sums": microseconds(add_up)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--step-us", type=float, help="microseconds of a decode step to compare with")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/trace_cost.jsonl"))
    args = parser.parse_args()
    for name, shape in SHAPES.items():
        for rows in args.rows:
            us = measure(shape, rows)
            per_step = us["of_layers"] + us["row_sums"] / STEPS
            share = f", {per_step / args.step_us:.2%} of a step" if args.step_us else ""
            print(
                f"{name}, {rows} rows: {us['of_layers']:.1f} us a step, {us['row_sums']:.1f} us a call{share}",
                flush=True,
            )
            append_result(args.results, "trace", {"model": name, "rows": rows, "us": us, "us_per_step": per_step})


if __name__ == "__main__":
    main()
