# SPDX-License-Identifier: Apache-2.0
"""Times the routed feed-forward of a prefill chunk beside the bfloat16 one, in one run on one GPU.

    python benchmarks/kernels_prefill.py [--seconds 80] [--only REGEX] [--out FILE.jsonl]

A call multiplies a chunk of 2,048 tokens by pages strewn over an arena of several GiB; calls in a jitted loop rotate
through sets of experts. "layer" is all of ``moe_ffn``, "products" is gate_up, activation and down on sorted pairs. One
program serves all bitwidths; each is timed, and 2 to 8 mixed over the experts: median of 21 repetitions. The peers are
PyTorch's ``grouped_mm``, the same two parts, and one cuBLAS product per expert, in CUDA graphs. A model's loops are
compiled side by side before the first of them is timed, and its definition, which the mixed bitwidths are held to,
after the last.
"""

import argparse
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

sys.path.insert(0, str(Path(__file__).parents[1]))

from kernels_inputs import REPETITIONS, graph_us, pages_of, random_arena, relative_error, weighted_sum
from record import Results, append_result

from pallas_kernels.moe_ffn import grouped, reference
from pallas_kernels.moe_ffn.arg_specs import SPECS, MoESpec
from pallas_kernels.moe_ffn.grouped_order import order_inputs

TOKENS, SETS, ROUNDS = 2048, 3, 3
WIDTHS = 2, 3, 4, 5, 6, 7, 8


def draw_ids(spec: MoESpec) -> np.ndarray:
    """Returns int32[S, T, K]: experts drawn alike, distinct within a token."""
    rng = np.random.default_rng(7)
    calls = rng.random((SETS, TOKENS, spec.num_experts)).argsort(axis=-1)
    return calls[..., : spec.top_k].astype(np.int32)


def calls_of(spec: MoESpec):
    """Returns {part: (what is rotated, call)}; a call takes (arena, frames, bits_EU, m_TD, weights_TK, rotated)."""
    config = grouped.configure(spec.layouts[0], jnp.bfloat16, TOKENS * spec.top_k / spec.num_experts)

    def layer(arena, frames, bits_EU, m_TD, weights_TK, ids_TK):
        y_TKD, _ = grouped.moe_ffn(arena, pages_of(spec, frames, bits_EU), m_TD, ids_TK, spec.activation)
        return weighted_sum(y_TKD, weights_TK)

    def products(arena, frames, bits_EU, m_TD, weights_TK, tiles):
        pages = pages_of(spec, frames, bits_EU)
        return grouped.products(arena, pages, tiles, order_inputs(m_TD, spec.layouts[0]), spec.activation, config)[1]

    def tiles_of(ids_TK):
        return grouped.cut(ids_TK.reshape(-1), spec.num_experts, config)

    return {"layer": (lambda ids_TK: ids_TK, layer), "products": (tiles_of, products)}


def loop(call):
    """Returns f(args.., sets): every call waits for the one before."""
    call = jax.jit(call)  # traced once, not once a call

    def run(arena, frames, bits_EU, m_TD, weights_TK, sets):
        def body(_, m_TD):
            for rotated in sets:
                y = call(arena, frames, bits_EU, m_TD, weights_TK, rotated)
                m_TD = m_TD.at[0, 0].add((y[0, 0] * 1e-20).astype(m_TD.dtype))
            return m_TD

        return lax.fori_loop(0, ROUNDS, body, m_TD)

    return jax.jit(run)


def median_us(run, *args) -> float:
    seconds = []
    for _ in range(REPETITIONS + 2):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:]) / (ROUNDS * SETS) * 1e6


def peers(spec: MoESpec, ids_STK: np.ndarray) -> dict[tuple[str, str], float]:
    """Returns microseconds a call of PyTorch's bfloat16 (part, how), or nothing without PyTorch."""
    try:
        import torch
        import torch.nn.functional as F
    except ImportError:
        return {}
    make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    gate_up = make(spec.num_experts, 2 * spec.expert_width, spec.hidden_size) * 0.02
    down = make(spec.num_experts, spec.hidden_size, spec.expert_width) * 0.02
    m_TD, weights = make(TOKENS, spec.hidden_size), torch.rand(TOKENS, spec.top_k, 1, device="cuda")
    act = F.silu if spec.activation == "silu" else partial(F.gelu, approximate="tanh")
    sorts = []
    for ids in ids_STK.reshape(SETS, -1):
        order, counts = np.argsort(ids, kind="stable"), np.bincount(ids, minlength=spec.num_experts)
        arrays = order // spec.top_k, np.argsort(order), np.cumsum(counts).astype(np.int32)
        rows, back, ends = (torch.tensor(array, device="cuda") for array in arrays)
        sorts.append((rows, back, ends, counts.tolist(), m_TD[rows]))

    def products(x, ends):
        gate, up = torch._grouped_mm(x, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
        return torch._grouped_mm(act(gate) * up, down.transpose(1, 2), offs=ends)

    def combine(y, back):
        return (y[back].reshape(TOKENS, spec.top_k, -1) * weights).sum(1)

    def per_expert(rows, back, counts):
        found = []
        for e, x in enumerate(m_TD[rows].split(counts)):
            gate, up = F.linear(x, gate_up[e]).chunk(2, dim=1)
            found.append(F.linear(act(gate) * up, down[e]))
        return combine(torch.cat(found), back)

    ways = {
        ("products", "torch grouped_mm"): lambda rows, back, ends, counts, x: products(x, ends),
        ("layer", "torch grouped_mm"): lambda rows, back, ends, counts, x: combine(products(m_TD[rows], ends), back),
        ("layer", "cuBLAS per expert"): lambda rows, back, ends, counts, x: per_expert(rows, back, counts),
    }
    results = {}
    for way, call in ways.items():
        try:
            results[way] = graph_us(call, sorts)
        except Exception as error:  # a peer that this PyTorch lacks must not lose the rest
            print("no peer", *way, repr(error)[:200])
    return results


def time_model(spec: MoESpec, results: Results, seconds_left) -> None:
    """Prints and records every case of a model, each as soon as it is timed."""
    start = time.perf_counter()
    rng, (arena, tables) = np.random.default_rng(3), random_arena(spec)
    frames, ids = [jnp.asarray(table) for table in tables], [jnp.asarray(ids_TK) for ids_TK in draw_ids(spec)]
    m_TD = jnp.asarray(rng.standard_normal((TOKENS, spec.hidden_size)) * spec.hidden_size**-0.5, jnp.bfloat16)
    weights_TK = jnp.asarray(rng.random(ids[0].shape), jnp.float32)

    def with_bits(bits_E):
        return arena, frames, jnp.asarray(np.stack([bits_E, bits_E], axis=1), jnp.int32), m_TD, weights_TK

    mixed = with_bits(2 + np.arange(spec.num_experts) % 7)

    def compile_part(rotate, call):
        sets = [jax.jit(rotate)(ids_TK) for ids_TK in ids]
        return loop(call).lower(*mixed, sets).compile(), sets

    def show(part: str, how: str, us: float, peer: float | None):
        ratio = round(us / peer, 3) if peer else None
        print(f"    {part:10}{how:22}{us:>9.1f} us   {ratio or '':>6} x grouped_mm", flush=True)
        record = {"model": spec.name, "tokens": TOKENS, "part": part, "how": how, "us": round(us, 1)}
        append_result(results, "kernels_prefill", record | {"to_grouped_mm": ratio})

    with ThreadPoolExecutor(3) as pool:
        jobs = {part: pool.submit(compile_part, *call) for part, call in calls_of(spec).items()}
        pool.submit(import_module, "torch")  # takes seconds, and is asked for again
        wait(jobs.values())
    print(f"{spec.name}, {TOKENS} tokens; compiled after {time.perf_counter() - start:.1f} s", flush=True)
    peer_us = peers(spec, draw_ids(spec))
    for (part, how), us in peer_us.items():
        show(part, how, us, peer_us.get((part, "torch grouped_mm")))
    cases = [(f"{bits} bits", with_bits(np.full(spec.num_experts, bits))) for bits in WIDTHS]
    for how, args in [*cases, ("2 to 8 bits mixed", mixed)]:
        for part, job in jobs.items():
            run, sets = job.result()
            show(part, how, median_us(run, *args, sets), peer_us.get((part, "torch grouped_mm")))
    if seconds_left() < 0:
        print("out of time for the definition")
        return

    def define(arena, frames, bits_EU, m_TD, weights_TK, ids_TK):
        pages, x_TD = pages_of(spec, frames, bits_EU), m_TD.astype(jnp.float32)
        return weighted_sum(reference.moe_ffn(arena, pages, x_TD, ids_TK, spec.activation)[0], weights_TK)

    layer = calls_of(spec)["layer"][1]
    error = relative_error(*(jax.jit(f)(*mixed, ids[0]) for f in (layer, define)))
    print(f"    relative error {error:.1e}", flush=True)
    append_result(results, "kernels_prefill", {"model": spec.name, "tokens": TOKENS, "error": error})
    if not error < 1e-2:
        raise AssertionError(f"{spec.name}: relative error {error}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=80, help="start no case after this long")
    parser.add_argument("--only", default="", help="models whose name this regular expression finds")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kernels_prefill.jsonl")
    options = parser.parse_args()
    if jax.devices()[0].platform != "gpu":
        print("benchmarks/kernels_prefill.py: no GPU; nothing here can be timed", file=sys.stderr)
        return 2
    start = time.perf_counter()
    specs = [spec for spec in SPECS.values() if re.search(options.only, spec.name)]

    results = Results(options.out)
    for spec in specs:
        if time.perf_counter() - start > options.seconds:
            print("out of time for", spec.name)
            continue
        time_model(spec, results, lambda: options.seconds - (time.perf_counter() - start))
    return 0


if __name__ == "__main__":
    sys.exit(main())
