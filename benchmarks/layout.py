# SPDX-License-Identifier: Apache-2.0
"""Chooses the order of words in a bit-plane by measurement: candidate layouts under the same kernels.

    python benchmarks/layout.py [--seconds 150] [--only REGEX] [--out benchmarks/results/layout.jsonl]

A candidate says how wide tiles are, how many rows they have, and how gate and up rows are ordered; every candidate runs
under ``linear_block``, in several program sizes, on pages strewn over an arena of more than 4 GiB. All are compiled
first: a compilation beside a timing starves its launches. Then each is held to the definition
(``bitplane.dequantize_pages``, float32) with two bitwidths mixed over the experts, and timed: eight calls unrolled in a
loop inside one jit, the experts of each call drawn so that a round through them is larger than the L2 cache, median of
21 repetitions. A call is the kernel and one small fusion that draws its experts. Two ceilings are timed the same way: a
kernel that only stores zeros, and one that only reads the planes. Without a GPU the kernels are interpreted on tiny
shapes: a check of this script, not a timing.
"""

import argparse
import dataclasses
import json
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

sys.path.insert(0, str(Path(__file__).parents[1]))

from layout_candidates import VARIANTS, Case, cases
from lookup_kernel import Config, linear_block, load_words
from record import environment

from pallas_kernels._triton import CompilerParams
from pallas_kernels.bitplane import BlockLayout, dequantize_pages
from pallas_kernels.cases import relative_error
from pallas_kernels.moe_ffn.arg_specs import SPECS, MoESpec

UNROLL = 8
REPETITIONS = 21
CHECK_BITS = (3, 8)
ARENA_BYTES = (4 << 30) + (256 << 20)


def kernel(case: Case, interpret: bool):
    """Returns f(arena, frames, bits_EU, ids_P, x) -> [P, rows]."""
    layout, num_rows = case.layout, min(case.config.rows, case.layout.tile_rows)

    def gate(gate_R, up_R):
        return jax.nn.silu(gate_R) * up_R

    def finish(y_R):
        if not layout.interleaved or layout.order == "apart":
            return y_R
        pairs = y_R.reshape(-1, 2) if layout.order == "turns" else y_R.reshape(2, -1).T
        return gate(*(half.reshape(-1) for half in jnp.split(pairs, 2, axis=1)))

    def block(arena, frames, bits_EU, ids_P, x):
        out = jax.ShapeDtypeStruct((len(ids_P), case.columns_out), jnp.float32)
        y = linear_block(
            arena, layout, frames, bits_EU, case.kind, ids_P, x, out, case.config, finish, interpret=interpret
        )
        return gate(*jnp.split(y, 2, axis=1)) if layout.interleaved and layout.order == "apart" else y

    def ceiling(arena_ref, frames_ref, bits_ref, ids_ref, out_ref):
        program, pair = pl.program_id(0), pl.program_id(1)
        y_R = jnp.zeros(num_rows, jnp.int32)
        if case.what == "planes":
            e = ids_ref[pair]
            bits = bits_ref[e, case.kind]
            for band, (width, tiles) in enumerate(layout.bands):

                def tile(t, acc_RT, band=band):
                    words = load_words(
                        layout, num_rows, arena_ref, frames_ref, e, bits, program * num_rows, band, t, layout.max_bits
                    )
                    for word_RT in words:
                        acc_RT ^= word_RT
                    return acc_RT

                acc_RT = lax.fori_loop(0, tiles, tile, jnp.zeros((num_rows, width), jnp.uint32))
                y_R += jnp.sum(acc_RT.astype(jnp.int32), axis=1)
        out_ref[pair, pl.ds(program * num_rows, num_rows)] = y_R.astype(jnp.float32)

    def run_ceiling(arena, frames, bits_EU, ids_P, x):
        return pl.pallas_call(
            ceiling,
            grid=(layout.rows // num_rows, len(ids_P)),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 4,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            out_shape=jax.ShapeDtypeStruct((len(ids_P), layout.rows), jnp.float32),
            compiler_params=CompilerParams(num_warps=case.config.num_warps, num_stages=1),
            interpret=interpret,
            name=case.what,
        )(arena, frames, bits_EU, ids_P)

    return block if case.what == "block" else run_ceiling


def loop(call, calls: int):
    """Returns a jitted f(arena, frames, bits, ids_SP, x) of ``calls`` dependent calls; returns the last output."""

    call = jax.jit(call)  # traced once, not once a call

    def run(arena, frames, bits_EU, ids_SP, x):
        def body(i, carry):
            zero, out = carry
            for j in range(min(UNROLL, calls)):
                out = call(arena, frames, bits_EU, ids_SP[(i * UNROLL + j) % len(ids_SP)] + zero, x)
                zero = (out[0, 0] != out[0, 0]).astype(jnp.int32)  # keeps each call, in order; outputs are float32
            return zero, out

        shape = jax.eval_shape(call, arena, frames, bits_EU, ids_SP[0], x)
        return lax.fori_loop(0, -(-calls // UNROLL), body, (jnp.int32(0), jnp.zeros(shape.shape, shape.dtype)))[1]

    return jax.jit(run)


@partial(jax.jit, static_argnums=0)
def random_arena(shape: tuple[int, int]) -> jax.Array:
    key = jax.random.key(0, impl="rbg" if shape[0] > 1 << 16 else "threefry2x32")
    return jax.random.bits(key, shape, jnp.uint32)


@partial(jax.jit, donate_argnums=0)
def make_finite(arena: jax.Array, frames: jax.Array) -> jax.Array:
    """Clears the top exponent bit of every float16 in ``frames``, so that LUTs hold numbers below 2."""
    return arena.at[frames].set(arena[frames] & jnp.uint32(0xBFFFBFFF))


def lut_frames(layout: BlockLayout, frames: np.ndarray) -> np.ndarray:
    first = [
        range(layout.page_starts[p] + layout.lut_offset_words(p) // layout.frame_words, layout.page_starts[p + 1])
        for p in range(layout.max_bits)
        if layout.has_lut(p)
    ]
    return frames[:, np.concatenate([np.array(r) for r in first])].reshape(-1)


def definition(case: Case, num_frames: int):
    """Returns f(arena, frames, bits_EU, ids_P, x): what the kernel must return, from dequantized float32 weights."""
    plain = dataclasses.replace(case.layout, interleaved=False)  # stored row order
    starts, source_order = plain.page_starts, np.argsort(case.layout.stored_rows)

    def product(bits, arena, frames_F, x_C):
        pages = [arena[frames_F[starts[p] : starts[p + 1]]] for p in range(bits)]
        return jnp.sum(dequantize_pages(pages, plain) * x_C, axis=1)[source_order]

    arena, frames, _, _, x = abstract_inputs(case, num_frames)
    row = [jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for array in (frames, x)]
    products = {bits: jax.jit(partial(product, bits)).lower(arena, *row).compile() for bits in CHECK_BITS}

    def define(arena, frames, bits_EU, ids_P, x):
        bits, pairs_per_row = np.asarray(bits_EU)[:, case.kind], len(ids_P) // len(x)
        pairs = enumerate(np.asarray(ids_P))
        y_PN = np.stack([products[int(bits[e])](arena, frames[e], x[p // pairs_per_row]) for p, e in pairs])
        if not case.layout.interleaved:
            return y_PN
        gate_PF, up_PF = np.split(y_PN, 2, axis=1)
        return jax.nn.silu(gate_PF) * up_PF

    return define


def make_inputs(case: Case, arenas: dict):
    """Returns (arena, frames, ids_SP, x) on the device; the arena's LUTs hold finite numbers from here on."""
    layout, spec, rng = case.layout, case.spec, np.random.default_rng(1)
    num_frames = arenas[layout.frame_words].shape[0]
    frames = rng.permutation(num_frames)[: spec.num_experts * layout.block_frames].reshape(spec.num_experts, -1)
    arenas[layout.frame_words] = make_finite(arenas[layout.frame_words], lut_frames(layout, frames))
    pairs = case.tokens * spec.top_k
    rounds = max(4, spec.num_experts // pairs)
    picks = [rng.permutation(spec.num_experts)[: spec.top_k] for _ in range(rounds * case.tokens)]
    if case.tokens == 1:  # one round meets every expert
        deck = np.resize(rng.permutation(spec.num_experts), rounds * pairs)
        picks = list(deck.reshape(-1, spec.top_k))
    ids_SP = np.stack(picks).reshape(rounds, pairs).astype(np.int32)
    x = rng.standard_normal((case.tokens if case.kind == 0 else pairs, layout.columns)).astype(np.float32)
    return arenas[layout.frame_words], jnp.asarray(frames.astype(np.int32)), jnp.asarray(ids_SP), jnp.asarray(x)


def abstract_inputs(case: Case, num_frames: int):
    shape = jax.ShapeDtypeStruct
    pairs = case.tokens * case.spec.top_k
    rounds = max(4, case.spec.num_experts // pairs)
    return (
        shape((num_frames, case.layout.frame_words), jnp.uint32),
        shape((case.spec.num_experts, case.layout.block_frames), jnp.int32),
        shape((case.spec.num_experts, 2), jnp.int32),
        shape((rounds, pairs), jnp.int32),
        shape((case.tokens if case.kind == 0 else pairs, case.layout.columns), jnp.float32),
    )


def median_us(run, args, calls: int, repetitions: int) -> float:
    for _ in range(2):
        run(*args).block_until_ready()
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        run(*args).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / calls * 1e6


def measure(case: Case, run, define, arenas: dict, calls: int, repetitions: int) -> list[dict]:
    """Returns one record per bitwidth, after the check against the definition."""
    arena, frames, ids_SP, x = make_inputs(case, arenas)
    shape_EU = (case.spec.num_experts, 2)
    error = None
    if case.what == "block":
        bits_EU = jnp.asarray(np.random.default_rng(2).choice(CHECK_BITS, shape_EU), jnp.int32)
        out = run(arena, frames, bits_EU, ids_SP, x)
        error = relative_error(out, define(arena, frames, bits_EU, ids_SP[(calls - 1) % len(ids_SP)], x))
        if not error < 1e-5:
            raise AssertionError(f"relative error {error}")
    every_bits = case.variant == next(iter(VARIANTS)) and case.config == Config(rows=8, num_warps=4)
    some_bits = range(2, 9) if every_bits and case.tokens == 1 else (4, 8)
    records = []
    for bits in some_bits if case.what != "empty" else (4,):
        args = arena, frames, jnp.full(shape_EU, bits, jnp.int32), ids_SP, x
        us = median_us(run, args, calls, repetitions)
        plane_bytes = ids_SP.shape[1] * bits * case.layout.plane_words * 4
        records.append({"bits": bits, "us": round(us, 2), "gb_s": round(plane_bytes / us / 1e3, 1), "error": error})
    return records


def tiny(spec: MoESpec) -> MoESpec:
    """The same kinds of bands in few words: C/32 of 11, 6 and 4."""
    width = {"qwen1.5-moe": 11, "mixtral-8x7b": 4, "gemma-4-26b": 6}[spec.name]
    sizes = {"hidden_size": 128, "expert_width": 32 * width, "num_experts": 4, "top_k": 2, "frame_words": 512}
    return dataclasses.replace(spec, **sizes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=150, help="stop after this long")
    parser.add_argument("--only", default="", help="cases whose name this regular expression finds")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "layout.jsonl")
    options = parser.parse_args()
    start = time.perf_counter()
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    about = environment()
    print(about, flush=True)

    specs = list(SPECS.values()) if on_gpu else [tiny(spec) for spec in SPECS.values()]
    todo = [case for case in cases(specs) if re.search(options.only, case.name)]
    calls, repetitions = (6 * UNROLL, REPETITIONS) if on_gpu else (1, 1)
    arena_bytes = ARENA_BYTES if on_gpu else 4 << 20
    arenas = {w: random_arena((arena_bytes // (4 * w), w)) for w in {case.layout.frame_words for case in todo}}

    def compile_case(case: Case):
        args = abstract_inputs(case, arenas[case.layout.frame_words].shape[0])
        return loop(kernel(case, interpret=not on_gpu), calls).lower(*args).compile()

    compiled, definitions = {}, {}
    with ThreadPoolExecutor(14 if on_gpu else 2) as pool:
        for case in todo:
            compiled[case] = pool.submit(compile_case, case)
            if (case.layout, case.tokens) not in definitions:
                num_frames = arenas[case.layout.frame_words].shape[0]
                definitions[case.layout, case.tokens] = pool.submit(definition, case, num_frames)
        wait([*compiled.values(), *definitions.values()], timeout=0.6 * options.seconds)
        pool.shutdown(cancel_futures=True)  # nothing may compile beside a timing
    missed = {case for case in todo if compiled[case].cancelled() or definitions[case.layout, case.tokens].cancelled()}
    ready = [case for case in todo if case not in missed]
    print(f"{time.perf_counter() - start:6.1f}s compiled {len(ready)} of {len(todo)} cases", flush=True)

    records = []
    with options.out.open("a") as file:
        for case in ready:
            if time.perf_counter() - start > options.seconds:
                print("out of time for", case.name)
                continue
            try:
                define = definitions[case.layout, case.tokens].result()
                found = measure(case, compiled[case].result(), define, arenas, calls, repetitions)
            except Exception as error:  # one bad candidate must not lose the rest
                print("FAILED", case.name, repr(error)[:300], flush=True)
                continue
            for record in found:
                record = {
                    "model": case.spec.name,
                    "block": ("gate_up", "down")[case.kind],
                    "variant": case.variant,
                    "what": case.what,
                    "tokens": case.tokens,
                    "frame_bytes": case.layout.frame_words * 4,
                    "rows": case.config.rows,
                    "num_warps": case.config.num_warps,
                    **record,
                    **about,
                }
                file.write(json.dumps(record) + "\n")
                records.append(record)
            shown = " ".join(f"{r['bits']}b {r['us']:.1f}us" for r in found)
            print(f"{time.perf_counter() - start:6.1f}s {case.name}: {shown} error {found[0]['error']}", flush=True)
    print_table(records)
    return 0


def print_table(records: list[dict]) -> None:
    """Prints, per block and variant, the best program size at 4 and at 8 bits."""
    best: dict[tuple, dict[int, dict]] = {}
    for r in records:
        at = best.setdefault((r["model"], r["block"], r["tokens"], r["variant"], r["what"]), {})
        if r["bits"] not in at or r["us"] < at[r["bits"]]["us"]:
            at[r["bits"]] = r
    print(f"{'block':24}{'tokens':>7}  {'variant':20}{'what':8}" + "".join(f"{f'us, {b} bits':>22}" for b in (4, 8)))
    for (model, block, tokens, variant, what), at in sorted(best.items()):
        row = f"{model + ' ' + block:24}{tokens:>7}  {variant:20}{what:8}"
        for bits in (4, 8):
            r = at.get(bits)
            row += f"{r['us']:>14.1f} ({r['rows']:>2}x{r['num_warps']})" if r else " " * 22
        print(row)


if __name__ == "__main__":
    sys.exit(main())
