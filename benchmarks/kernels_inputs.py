# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of the MoE kernels share: cases, random pages strewn over an arena, loops of calls, timers."""

import gzip
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.bitplane import BlockLayout
from pallas_kernels.moe_ffn import pallas_triton
from pallas_kernels.moe_ffn.arg_specs import SPECS, MoESpec
from pallas_kernels.moe_ffn.pages import WeightPages

REPETITIONS = 21
ARENA_BYTES = 5 << 30


@dataclass(frozen=True)
class Case:
    """Calls to time: ``tokens`` of a model, on ``experts`` distinct ones if that is given."""

    spec: MoESpec
    tokens: int
    experts: int | None = None

    @property
    def name(self) -> str:
        return f"{self.spec.name} {self.tokens} tokens" + (f" {self.experts} experts" if self.experts else "")


CASES = [
    Case(SPECS["qwen1.5-moe"], 1),
    Case(SPECS["qwen1.5-moe"], 16, 40),
    Case(SPECS["mixtral-8x7b"], 1),
    Case(SPECS["gemma-4-26b"], 8),
    Case(SPECS["qwen1.5-moe"], 4),
    Case(SPECS["qwen1.5-moe"], 64),
    Case(SPECS["gemma-4-26b"], 1),
]


def draw_ids(case: Case) -> np.ndarray:
    """Returns int32[S, T, K]: experts of S calls, distinct within a token; one token's calls meet every expert."""
    rng, num_experts, top_k = np.random.default_rng(7), case.spec.num_experts, case.spec.top_k
    if case.tokens == 1:
        decks = [rng.permutation(num_experts) for _ in range(4 * top_k)]
        return np.concatenate(decks).reshape(-1, 1, top_k)[:60].astype(np.int32)
    calls = []
    for _ in range(max(3, 96 // case.tokens)):
        if case.experts:  # each of them for one token, then for others that do not have it
            pool = rng.permutation(num_experts)[: case.experts]
            tokens = [list(pool[t :: case.tokens]) for t in range(case.tokens)]
            for chosen in tokens:
                chosen += list(rng.permutation(np.setdiff1d(pool, chosen))[: top_k - len(chosen)])
            calls.append(np.array(tokens))
        else:
            calls.append(np.stack([rng.permutation(num_experts)[:top_k] for _ in range(case.tokens)]))
    return np.stack(calls).astype(np.int32)


def random_arena(spec: MoESpec) -> tuple[jax.Array, list[np.ndarray]]:
    """Returns (arena, frames of gate_up and down): random words, LUT entries finite."""
    used_frames = spec.num_experts * sum(layout.block_frames for layout in spec.layouts)
    num_frames = max(used_frames + 1, ARENA_BYTES // (4 * spec.frame_words))
    key = jax.random.key(0, impl="rbg")
    arena = jax.jit(lambda: jax.random.bits(key, (num_frames, spec.frame_words), jnp.uint32))()
    order, tables = np.random.default_rng(1).permutation(num_frames).astype(np.int32), []
    finite = jax.jit(lambda a, f: a.at[f].set(a[f] & jnp.uint32(0xBFFFBFFF)), donate_argnums=0)  # below 2
    for layout in spec.layouts:
        count = spec.num_experts * layout.block_frames
        tables.append(order[:count].reshape(spec.num_experts, -1))
        order = order[count:]
        arena = finite(arena, jnp.asarray(tables[-1][:, lut_frames(layout)].reshape(-1)))
    return arena, tables


def lut_frames(layout: BlockLayout) -> np.ndarray:
    first = [
        np.arange(layout.page_starts[p] + layout.lut_offset_words(p) // layout.frame_words, layout.page_starts[p + 1])
        for p in range(layout.max_bits)
        if layout.has_lut(p)
    ]
    return np.concatenate(first)


def pages_of(spec: MoESpec, frames, bits_EU) -> WeightPages:
    return WeightPages(
        bits_EU=bits_EU,
        gate_up_frames_EF=frames[0],
        down_frames_EF=frames[1],
        gate_up=spec.layouts[0],
        down=spec.layouts[1],
    )


def loop(call, rounds: int):
    """Returns f(*args, ids, m): every call of ``rounds`` rounds waits for the one before; the last result."""
    call = jax.jit(call)  # traced once, not once a call

    def run(args, ids, m_TD):
        def body(_, carry):
            m, _ = carry
            for ids_TK in ids:
                y = call(*args, ids_TK, m)
                m = (m_TD + y * 1e-20).astype(m_TD.dtype)
            return m, y

        return lax.fori_loop(0, rounds, body, (m_TD, jnp.zeros(m_TD.shape, jnp.float32)))[1]

    return jax.jit(run)


def seconds_of(run, args) -> float:
    """Returns the median time of a run."""
    for _ in range(2):
        run(*args).block_until_ready()
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        run(*args).block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def kernel_times(run, args, calls: int) -> dict[str, float]:
    """Returns microseconds a call of each kernel, by name, from JAX's profiler; without the gaps between kernels."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=False):
            run(*args).block_until_ready()
        [file] = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    streams = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name" and "Stream" in event["args"]["name"]
    }
    times = {}
    for event in events:
        if event.get("ph") == "X" and (event["pid"], event["tid"]) in streams:
            times[event["name"]] = times.get(event["name"], 0.0) + event["dur"] / calls
    return {name: round(us, 2) for name, us in sorted(times.items(), key=lambda item: -item[1]) if us > 0.1}


def graph_us(call, argument_lists: list[tuple]) -> float:
    """Returns the microseconds of a PyTorch call in a CUDA graph of one call per list of arguments, median."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(*argument_lists[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arguments in argument_lists:
            call(*arguments)
    times = []
    for _ in range(REPETITIONS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[2:]) / len(argument_lists)


def relative_error(out, ref) -> float:
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    return float(np.linalg.norm(out - ref) / np.linalg.norm(ref))


@dataclass(frozen=True)
class Inputs:
    """A case's arrays.

    Attributes:
      arena, frames: memory, and the frame tables of gate_up and down.
      m_TD, weights_TK: tokens and routing weights, the same in every call.
      ids: int32[T, K] of each call of a round.
      rounds: of calls in a loop.
    """

    case: Case
    arena: jax.Array
    frames: list
    m_TD: jax.Array
    weights_TK: jax.Array
    ids: list
    rounds: int

    @property
    def calls(self) -> int:
        return self.rounds * len(self.ids)

    def args(self, bits_E) -> tuple:
        """Returns the arguments of ``lower_layer``'s function."""
        bits_EU = jnp.asarray(np.stack([bits_E, bits_E], axis=1), jnp.int32)
        return (self.arena, self.frames, bits_EU, self.weights_TK), self.ids, self.m_TD


def make_inputs(case: Case, arena: jax.Array, tables: list) -> Inputs:
    spec, rng, ids_STK = case.spec, np.random.default_rng(3), draw_ids(case)
    return Inputs(
        case=case,
        arena=arena,
        frames=[jnp.asarray(table) for table in tables],
        m_TD=jnp.asarray(rng.standard_normal((case.tokens, spec.hidden_size)) * spec.hidden_size**-0.5, jnp.bfloat16),
        weights_TK=jnp.asarray(rng.random(ids_STK.shape[1:]), jnp.float32),
        ids=[jnp.asarray(ids_TK) for ids_TK in ids_STK],
        rounds=max(2, 200 // len(ids_STK)) if case.tokens == 1 else 3,
    )


def weighted_sum(y_TKD: jax.Array, weights_TK: jax.Array) -> jax.Array:
    """Returns the layer's output from its experts'."""
    return jnp.sum(weights_TK[..., None] * y_TKD, axis=1)


def lower_layer(inputs: Inputs) -> jax.stages.Lowered:
    """Returns the loop of the case's calls, lowered; it takes ``inputs.args(bits_E)``."""
    spec = inputs.case.spec

    def layer(arena, frames, bits_EU, weights_TK, ids_TK, m_TD):
        pages = pages_of(spec, frames, bits_EU)
        return weighted_sum(pallas_triton.moe_ffn(arena, pages, m_TD, ids_TK, spec.activation)[0], weights_TK)

    return loop(layer, inputs.rounds).lower(*inputs.args(np.full(spec.num_experts, spec.max_bits)))
