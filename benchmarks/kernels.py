# SPDX-License-Identifier: Apache-2.0
"""Times the routed feed-forward of decode steps beside its ceilings and its peers on one GPU.

    python benchmarks/kernels.py [--seconds 80] [--only REGEX] [--bits 4,3,6] [--profile] [--no-peers]

A call is ``moe_ffn`` in bfloat16, everything from the tokens' inputs to their weighted sum, on pages strewn over an
arena of more than 4 GiB. Calls are unrolled in a loop inside one jit, each with expert ids of its own, so that a round
through them is larger than the L2 cache, and each waits for the one before. Everything is compiled first: a compilation
beside a timing starves its launches. Then each case is held to the definition with bitwidths 2 to 8 mixed over the
experts, and timed: median of 21 repetitions. Ceilings, timed alike: as many kernels and programs that only store,
and a device copy. Peers, in PyTorch if it is there: bfloat16 weights, ``grouped_mm`` and one cuBLAS product per expert,
in a CUDA graph with the same ids.
"""

import argparse
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

sys.path.insert(0, str(Path(__file__).parents[1]))

from kernels_inputs import (
    CASES,
    Case,
    Inputs,
    graph_us,
    kernel_times,
    loop,
    lower_layer,
    make_inputs,
    pages_of,
    random_arena,
    relative_error,
    seconds_of,
    weighted_sum,
)
from record import environment

from pallas_kernels._triton import CompilerParams
from pallas_kernels.moe_ffn import reference

MIXED = {"3 and 5": (3, 5), "2 and 6": (2, 6), "3, 4 and 5": (3, 4, 5)}
"""Bitwidths in turn over the experts, with planes of the bytes of 4 bits."""


def plane_bytes(inputs: Inputs, bits_E: np.ndarray) -> float:
    """Returns the mean over the calls of the bytes of the selected experts' planes, each expert once."""
    words = sum(layout.plane_words for layout in inputs.case.spec.layouts)
    return float(np.mean([4 * words * bits_E[np.unique(ids_TK)].sum() for ids_TK in inputs.ids]))


def launches(case: Case):
    """Returns a call of as many kernels and programs as the layer's, which only store."""
    spec, pairs = case.spec, case.tokens * case.spec.top_k

    def empty(x, grid):
        def kernel(x_ref, out_ref):
            out_ref[pl.program_id(0), pl.program_id(1)] = jnp.float32(0)

        any_space = pl.BlockSpec(memory_space=pl.ANY)
        shape = jax.ShapeDtypeStruct(grid, jnp.float32)
        params = CompilerParams(num_warps=4, num_stages=1)
        return pl.pallas_call(
            kernel, grid=grid, in_specs=[any_space], out_specs=any_space, out_shape=shape, compiler_params=params
        )(x)

    def call(ids_TK, m_TD):
        x = m_TD
        for rows, layout in ((case.tokens, spec.layouts[0]), (pairs, spec.layouts[1])):
            x = empty(x, (rows, 16))
            x = empty(x, (layout.rows // 16, pairs))
        return m_TD * x[0, 0]

    return call


def copy_bytes_per_second() -> float:
    """Returns bytes read and written per second by a device copy of 4 GiB."""
    x = jnp.ones((1 << 30,), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / seconds_of(copy, (x,))


def peers(case: Case, ids_STK: np.ndarray) -> dict[str, float]:
    """Returns microseconds a call of PyTorch's bfloat16 layers, or nothing without PyTorch."""
    try:
        import torch
        import torch.nn.functional as F
    except ImportError:
        return {}
    spec, top_k = case.spec, case.spec.top_k
    make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    gate_up = make(spec.num_experts, 2 * spec.expert_width, spec.hidden_size) * 0.02
    down = make(spec.num_experts, spec.hidden_size, spec.expert_width) * 0.02
    m, weights = make(case.tokens, spec.hidden_size), torch.rand(case.tokens, top_k, 1, device="cuda")
    act = F.silu if spec.activation == "silu" else partial(F.gelu, approximate="tanh")
    sorts = []
    for ids in ids_STK.reshape(len(ids_STK), -1):
        order = np.argsort(ids, kind="stable")
        ends = np.cumsum(np.bincount(ids, minlength=spec.num_experts))
        used = [(int(e), int(ends[e - 1]) if e else 0, int(ends[e])) for e in np.unique(ids)]
        arrays = order // top_k, np.argsort(order), ends.astype(np.int32)
        sorts.append((*(torch.tensor(array, device="cuda") for array in arrays), used))

    def combine(y, back):
        return (y[back].reshape(case.tokens, top_k, -1) * weights).sum(1)

    def grouped(rows, back, ends, used):
        gate, up = torch._grouped_mm(m[rows], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
        return combine(torch._grouped_mm(act(gate) * up, down.transpose(1, 2), offs=ends), back)

    def per_expert(rows, back, ends, used):
        x, found = m[rows], []
        for e, start, end in used:
            gate, up = F.linear(x[start:end], gate_up[e]).chunk(2, dim=1)
            found.append(F.linear(act(gate) * up, down[e]))
        return combine(torch.cat(found), back)

    results = {}
    for name, call in (("torch grouped_mm", grouped), ("cuBLAS per expert", per_expert)):
        try:
            results[name] = graph_us(call, sorts)
        except Exception as error:  # a peer that this PyTorch lacks must not lose the rest
            print("no peer", name, repr(error)[:200])
    return results


def measure(compiled: dict, inputs: Inputs, copy_rate: float, options):
    """Yields the case's records, after the check against the definition."""
    widths = [int(bits) for bits in options.bits.split(",")]
    case, layer, experts = inputs.case, compiled["layer"], np.arange(inputs.case.spec.num_experts)
    args = inputs.args(2 + experts % 7)
    (arena, frames, bits_EU, weights_TK), ids, m_TD = args
    expected = compiled["define"](arena, frames, bits_EU, m_TD.astype(jnp.float32), ids[-1], weights_TK)
    error = relative_error(layer(*args), expected)
    if not error < 1e-2:
        raise AssertionError(f"relative error {error}")

    def record(what, us, bits_E=None):
        found = {"what": what, "us": round(us, 2), "error": error}
        if bits_E is not None:
            found["gb_s"] = round(plane_bytes(inputs, bits_E) / us / 1e3, 1)
            found["share_of_copy"] = round(found["gb_s"] * 1e9 / copy_rate, 3)
        return found

    named = [(f"{bits} bits", (bits,)) for bits in widths]
    if 4 in widths:
        named[1:1] = [(f"{name} bits mixed", mix) for name, mix in MIXED.items()]
    for name, mix in named:
        bits_E = np.array(mix)[experts % len(mix)]
        yield record(name, seconds_of(layer, inputs.args(bits_E)) / inputs.calls * 1e6, bits_E)
    if options.profile:
        times = kernel_times(layer, inputs.args(np.full(len(experts), widths[0])), inputs.calls)
        yield record(f"{widths[0]} bits, kernels alone", sum(times.values())) | {"kernels": times}
    yield record("launches", seconds_of(compiled["launches"], ((), ids, m_TD)) / inputs.calls * 1e6)
    if not options.no_peers:
        for name, us in peers(case, np.stack(ids)).items():
            yield record(name, us)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=80, help="start no case after this long")
    parser.add_argument("--only", default="", help="cases whose name this regular expression finds")
    parser.add_argument("--bits", default="4,3,6,8,2,5,7", help="bitwidths, most important first; with 4, mixed ones")
    parser.add_argument("--profile", action="store_true", help="the time of each kernel as well")
    parser.add_argument("--no-peers", action="store_true", help="nothing of PyTorch")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kernels.jsonl")
    options = parser.parse_args()
    if jax.devices()[0].platform != "gpu":
        print("benchmarks/kernels.py: no GPU; nothing here can be timed", file=sys.stderr)
        return 2
    start, about = time.perf_counter(), environment()
    todo = [case for case in CASES if re.search(options.only, case.name)]
    memory = {spec.name: random_arena(spec) for spec in {case.spec for case in todo}}

    def prepare(case: Case):
        spec, inputs = case.spec, make_inputs(case, *memory[case.spec.name])

        def define(arena, frames, bits_EU, m_TD, ids_TK, weights_TK):
            y_TKD = reference.moe_ffn(arena, pages_of(spec, frames, bits_EU), m_TD, ids_TK, spec.activation)[0]
            return weighted_sum(y_TKD, weights_TK)

        (arena, frames, bits_EU, weights_TK), ids, m_TD = inputs.args(np.zeros(spec.num_experts))
        float_m_TD = m_TD.astype(jnp.float32)
        compiled = {
            "define": jax.jit(define).lower(arena, frames, bits_EU, float_m_TD, ids[-1], weights_TK).compile(),
            "layer": lower_layer(inputs).compile(),
            "launches": loop(launches(case), inputs.rounds).lower((), ids, m_TD).compile(),
        }
        return compiled, inputs

    with ThreadPoolExecutor(12) as pool:
        prepared = {case: pool.submit(prepare, case) for case in todo}
        wait(prepared.values())  # nothing may compile beside a timing
    copy_rate = copy_bytes_per_second()
    print(f"{time.perf_counter() - start:.1f} s to compile; device copy {copy_rate / 1e12:.2f} TB/s", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as file:
        for case in todo:
            if time.perf_counter() - start > options.seconds:
                print("out of time for", case.name)
                continue
            print(case.name, flush=True)
            named = {"model": case.spec.name, "tokens": case.tokens, "experts": case.experts}
            try:
                for record in measure(*prepared[case].result(), copy_rate, options):
                    rate = f"{record['gb_s']:>9.0f} GB/s {record['share_of_copy']:>6.1%}" if "gb_s" in record else ""
                    print(f"    {record['what']:24}{record['us']:>9.1f} us {rate}", flush=True)
                    if "kernels" in record:
                        print("       ", record["kernels"], flush=True)
                    file.write(json.dumps(named | record | about) + "\n")
                    file.flush()
            except Exception as error:  # one bad case must not lose the rest
                print("FAILED", case.name, repr(error)[:300], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
