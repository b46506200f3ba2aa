# SPDX-License-Identifier: Apache-2.0
"""The whole engine on a device at Qwen1.5-MoE-A2.7B's layer sizes, random weights: is memory handled as designed?

    python benchmarks/engine_smoke.py [--layers 2] [--experts 60] [--implementation triton]

Four questions, each with its figures: does a step update the arena in place, do tokens equal the CPU's, do bits fall
and come back under a budget, and do page transfers overlap with decode calls?
"""

import argparse
import dataclasses
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from random_checkpoint import RandomCheckpoint, qwen_moe_config
from record import append_result

from pagedweight_jax.config import PlannerConfig, ServeConfig
from pagedweight_jax.paging import table as pt
from pagedweight_jax.paging.arena import WEIGHT
from pagedweight_jax.serving.engine import Engine
from pagedweight_jax.serving.implementation import default_implementation
from pagedweight_jax.serving.loading import budget_bytes
from pagedweight_jax.serving.request import SamplingParams
from pagedweight_jax.serving.staging import plan_staging
from pagedweight_jax.units import format_size
from pallas_kernels.cases import relative_error
from pallas_kernels.implementation import IMPLEMENTATIONS

GIB = 1 << 30
PARTS = ("trade", "overlap", "parity")


def serve(engine, prompts, max_tokens):
    requests = [engine.add_request(p, SamplingParams(max_tokens=max_tokens, ignore_eos=True)) for p in prompts]
    while engine.has_work:
        engine.step()
    return [r.generated for r in requests]


def score(engine, prompt):
    request = engine.add_request(prompt, None)
    while engine.has_work:
        engine.step()
    return np.array(request.logprobs)


def compare_with_cpu(device, implementation):
    """Tokens and log-probabilities of a small model on the device and on the CPU, in float32, at mixed bitwidths.

    The CPU's are the definition's (``xla``), whatever the device runs; both work at the same time.
    """
    checkpoint = RandomCheckpoint.make(qwen_moe_config(2, num_experts=8, vocab_size=1024), 3, 6)
    config = ServeConfig(
        memory_bytes=2 * GIB,
        max_num_seqs=3,
        max_model_len=256,
        mode="frozen",
        bits=6,
        dtype="float32",
        kv_dtype="float32",
    )
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 1024, n).tolist()) for n in (40, 200, 7)]
    bits_LEU = rng.integers(3, 7, (2, 8, 2))
    changes = tuple((*place, 6, int(bits_LEU[place])) for place in np.ndindex(bits_LEU.shape) if bits_LEU[place] < 6)

    def run(where, which):
        began = time.perf_counter()
        with jax.default_device(where):
            engine = Engine(checkpoint, dataclasses.replace(config, implementation=which), where)
            engine.state, _ = engine.residency.lower(engine.state, engine.residency.plan_of(changes))
            built = time.perf_counter()
            tokens, logprobs = serve(engine, prompts, 32), score(engine, prompts[1])
            engine.close()
        print(f"{which}: built in {built - began:.1f} s, run in {time.perf_counter() - built:.1f} s", flush=True)
        return tokens, logprobs

    with ThreadPoolExecutor() as pool:
        sides = [(device, implementation), (jax.devices("cpu")[0], "xla")]
        (a, la), (b, lb) = pool.map(lambda side: run(*side), sides)
    equal = sum(x == y for p, q in zip(a, b) for x, y in zip(p, q))
    return {
        "platforms": [device.platform, "cpu"],
        "implementation": implementation,
        "blocks_by_bits": dict(zip(*(x.tolist() for x in np.unique(bits_LEU, return_counts=True)))),
        "tokens_equal": equal,
        "tokens_total": sum(len(p) for p in a),
        "logprob_relative_error": relative_error(la, lb),
    }


def memory_bytes_of(device, what):
    """The allocator's own count, None where there is none."""
    return (device.memory_stats() or {}).get(what)


def array_bytes_on(device):
    """Bytes of all arrays in the device's own memory, which is what the allocator was asked for."""
    arrays = jax.live_arrays(device.platform)
    return sum(a.nbytes for a in arrays if a.sharding.memory_kind == device.default_memory().kind)


def trade(checkpoint, device, implementation, prompt_tokens):
    """Serves growing contexts under a budget that cannot hold them beside the top width."""
    planner = PlannerConfig(low_watermark_blocks=32, high_watermark_blocks=64, max_reload_bytes=256 << 20)
    config = ServeConfig(
        memory_bytes=1,
        max_num_seqs=8,
        max_model_len=2048,
        steps_per_call=8,
        implementation=implementation,
        planner=planner,
    )
    kv_tokens = config.max_num_seqs * config.max_model_len // 8
    bits = checkpoint.manifest.max_bits
    memory_bytes = budget_bytes(checkpoint.manifest, config, bits=bits, kv_tokens=kv_tokens, device=device)
    began = time.perf_counter()
    engine = Engine(checkpoint, dataclasses.replace(config, memory_bytes=memory_bytes), device)
    build_seconds = time.perf_counter() - began
    print(f"budget {format_size(memory_bytes)}")
    for name, num_bytes in engine.ledger.rows():
        print(f"  {name:36s} {format_size(num_bytes):>12s}")
    build_peak_bytes = memory_bytes_of(device, "peak_bytes_in_use")
    program = engine.programs.decode.memory_analysis()
    pointer = engine.state.arena_AW.unsafe_buffer_pointer()
    start_bits = engine.residency.mean_bits
    rng = np.random.default_rng(1)
    prompts = [tuple(rng.integers(0, 4096, prompt_tokens).tolist()) for _ in range(8)]
    served = serve(engine, prompts, 48)
    in_place = engine.state.arena_AW.unsafe_buffer_pointer() == pointer
    began = time.perf_counter()
    while engine.residency.mean_bits < start_bits - 0.1 and time.perf_counter() - began < 10:
        engine.step()
    engine.check_invariants()
    record = {
        "implementation": implementation,
        "build_seconds": build_seconds,
        "arena_bytes": engine.ledger.arena_bytes,
        "decode_alias_bytes": program.alias_size_in_bytes,
        "decode_temporary_bytes": program.temp_size_in_bytes,
        "arena_in_place": in_place,
        "budget_bytes": memory_bytes,
        "start_bits": start_bits,
        "least_bits": min(e.mean_bits for e in engine.events),
        "end_bits": engine.residency.mean_bits,
        "tokens": sum(map(len, served)),
        "pages_landed": sum(e.pages_landed for e in engine.events),
        "landed_bytes": sum(e.moved_bytes for e in engine.events),
        "over_budget_boundaries": sum(e.device_bytes > e.budget_bytes for e in engine.events),
        "build_peak_bytes": build_peak_bytes,
        "peak_bytes": memory_bytes_of(device, "peak_bytes_in_use"),
        "in_use_bytes": memory_bytes_of(device, "bytes_in_use"),
        "array_bytes": array_bytes_on(device),
        "ledger_array_bytes": engine.ledger.dense_bytes + engine.ledger.arena_bytes + engine.ledger.table_bytes // 2,
    }
    return engine, record


def overlap(engine):
    """Times decode calls alone, transfers alone, and both together; what arrives is dropped again.

    There are as many calls as it takes for all pages to arrive beside them, a share of the staging memory at a time.

    Only the copies and the calls are inside the timed part: the page table's bookkeeping is done before and after. As
    in the engine, one call is in flight while the next is given (XLA holds a copy into memory that it allots until all
    calls given before have ended), and between two calls what has arrived makes room for what waits.
    """
    residency = engine.residency
    engine.config = dataclasses.replace(engine.config, mode="frozen")  # the planner would raise bits meanwhile
    engine.lower_to(residency.table.min_bits)
    residency.retire()
    rng = np.random.default_rng(2)
    for _ in range(8):
        engine.add_request(tuple(rng.integers(0, 4096, 64).tolist()), SamplingParams(max_tokens=1900, ignore_eos=True))
    for _ in range(4):
        engine.step()
    lengths_B, remaining_B = np.array(engine.state.lengths_B), np.array(engine.state.remaining_B)
    pages = np.argwhere(residency.table.state_LEUP == pt.HOST)
    page_frames = [residency.table.layouts[u].page_frames(p) for _, _, u, p in pages.tolist()]
    pages = pages[np.cumsum(page_frames) <= engine.allocator.num_free]
    moved_bytes = len(pt.frame_slots(residency.table.layouts, pages)) * engine.state.geometry.frame_bytes

    def take():
        desired_LEU = np.full_like(residency.table.desired_LEU, residency.table.max_bits)
        residency.table = pt.set_desired(residency.table, desired_LEU)
        frames = engine.allocator.take(len(pt.frame_slots(residency.table.layouts, pages)), WEIGHT)
        residency.table = pt.begin_reload(residency.table, pages, frames)
        return frames

    def give_back(landed):
        for pages_N4 in landed:
            residency.table, frames = pt.cancel(residency.table, pages_N4)
            engine.allocator.give(frames)

    def timed(transfer, calls):
        """Returns (seconds, calls given): ``calls``, or with None as many as it takes for all to arrive."""
        frames = take() if transfer else None
        rows = {"lengths_B": jnp.array(lengths_B), "remaining_B": jnp.array(remaining_B)}  # every run decodes the same
        engine.state = engine.state.replace(**rows)
        began = time.perf_counter()
        landed, tokens, given = [], None, 0
        if transfer:
            residency.mover.start_reload(pages, frames)
        while given < calls if calls is not None else sum(map(len, landed)) < len(pages):
            in_flight = tokens
            engine.state, tokens, *_ = engine.programs.decode(engine.weights, engine.state)
            jax.block_until_ready(in_flight)
            landed += [batch.pages_N4 for batch in residency.mover.poll()]
            given += 1
        landed += [batch.pages_N4 for batch in residency.mover.drain()]
        jax.block_until_ready(tokens)
        seconds = time.perf_counter() - began
        give_back(landed)
        return seconds, given

    def median(**what):
        timed(**what)
        return statistics.median(timed(**what)[0] for _ in range(3))

    calls = max(timed(transfer=True, calls=None)[1] for _ in range(2))
    alone, copy = median(transfer=False, calls=calls), median(transfer=True, calls=0)
    together = median(transfer=True, calls=calls)
    return {
        "implementation": engine.config.implementation,
        "pages": len(pages),
        "moved_bytes": moved_bytes,
        "batch_pages": plan_staging(residency.table.layouts, residency.table.committed_LEU[..., 0].size).batch_pages,
        "staging_bytes": engine.ledger.staging_bytes,
        "calls": calls,
        "decode_ms": 1e3 * alone,
        "transfer_ms": 1e3 * copy,
        "together_ms": 1e3 * together,
        "transfer_gb_per_s": moved_bytes / copy / 1e9,
        "hidden_share": max(0.0, min(1.0, (alone + copy - together) / min(alone, copy))),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=60)
    parser.add_argument("--max-bits", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS, help="overlap needs trade's engine")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, help="default: triton on a GPU")
    parser.add_argument("--out", default="benchmarks/results/engine_smoke.jsonl")
    arguments = parser.parse_args()
    device = jax.devices()[0]
    jnp.zeros(1).block_until_ready()
    implementation = arguments.implementation or default_implementation()
    config = qwen_moe_config(arguments.layers, num_experts=arguments.experts, vocab_size=32_768)
    checkpoint = RandomCheckpoint.make(config, 3, arguments.max_bits)
    if "trade" in arguments.parts:  # first: the peak of memory is the process's
        engine, record = trade(checkpoint, device, implementation, arguments.prompt_tokens)
        print("trade  ", record, flush=True)
        append_result(arguments.out, "engine_smoke.trade", record)
        if "overlap" in arguments.parts:
            record = overlap(engine)
            print("overlap", record, flush=True)
            append_result(arguments.out, "engine_smoke.overlap", record)
        engine.close()
    if "parity" in arguments.parts:
        parity = compare_with_cpu(device, implementation)
        print("parity ", parity, flush=True)
        append_result(arguments.out, "engine_smoke.parity", parity)


if __name__ == "__main__":
    main()
