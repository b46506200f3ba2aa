# SPDX-License-Identifier: Apache-2.0
"""What ``kernels_attention.py`` times: jitted loops of dependent calls on random caches."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.frames import pallas_triton as frames_triton
from pallas_kernels.frames import reference as frames_reference
from pallas_kernels.paged_attention import pallas_triton, reference
from pallas_kernels.paged_attention.arg_specs import SPECS, AttentionSpec
from pallas_kernels.paged_attention.pallas_triton_attend import Config
from pallas_kernels.paged_attention.pallas_triton_decode import DecodeConfig

ON_GPU = jax.devices()[0].platform == "gpu"
INTERPRET = not ON_GPU
ARENA_BYTES = (4 << 30) + (256 << 20) if ON_GPU else 1 << 20
SETS = 4
UNROLL = 48
"""Calls in the body of a loop: enough that its own cost, some 25 us, hardly shows."""

FINITE = 0xBFFFBFFF
"""Clears the top exponent bit of both bf16 of a word: any bits are then numbers below 2."""


@partial(jax.jit, static_argnums=0)
def random_arena(frame_words: int) -> jax.Array:
    key = jax.random.key(0, impl="rbg" if ON_GPU else "threefry2x32")
    return jax.random.bits(key, (ARENA_BYTES // (4 * frame_words), frame_words), jnp.uint32) & jnp.uint32(FINITE)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One figure.

    Attributes:
      what, shape, how: its name: the operation, its sizes, and the implementation with its program size.
      run: the jitted loop's function.
      frame_words: which arena is its first argument, 0 for none.
      donates: whether it returns that arena, updated.
      args: its other arguments.
      calls: of the operation in one run.
      moved_bytes, flops: of one call.
      pair: the operation and its definition, both of the arena and the first three of ``args``, or None.
    """

    what: str
    shape: str
    how: str
    run: Callable
    args: tuple
    calls: int
    moved_bytes: int
    frame_words: int = 0
    donates: bool = False
    flops: int = 0
    pair: tuple[Callable, Callable] | None = None

    @property
    def name(self) -> str:
        return f"{self.what} {self.shape} {self.how}"


def shown(config) -> str:
    fields = "" if config is None else ", ".join(f"{k} {v}" for k, v in vars(config).items())
    return f"triton ({fields})" if fields else "triton"


def places(num_frames: int, shape: tuple[int, ...], sets: int, seed: int = 0) -> list[jax.Array]:
    """Returns ``sets`` arrays of frames, none twice in one of them, in random order."""
    order, count = np.random.default_rng(seed).permutation(num_frames), int(np.prod(shape))
    return [jnp.asarray(np.roll(order, -i * count)[:count].reshape(shape).astype(np.int32)) for i in range(sets)]


def seen_keys(spec: AttentionSpec, context: int, tokens: int) -> np.ndarray:
    """Returns how many keys each of the last ``tokens`` queries of a context sees."""
    keys = context - tokens + 1 + np.arange(tokens)
    return np.minimum(keys, spec.window) if spec.window else keys


def attention_job(
    arenas, spec: AttentionSpec, rows: int, tokens: int, context: int, config: Config | None = None
) -> Job:
    """Returns the job of ``tokens`` queries for each of ``rows`` rows, the last of them at the end of ``context``."""
    layout = spec.layout()
    shape = (rows, context // layout.block_tokens, layout.layer_frames)
    tables = places(arenas[spec.frame_words].shape[0], shape, SETS)
    positions = jnp.tile(context - tokens + jnp.arange(tokens, dtype=jnp.int32), (rows, 1))
    q = jax.random.normal(jax.random.key(1), (rows, tokens, spec.num_heads, spec.head_dim), jnp.bfloat16)
    args = spec.score_scale, spec.window, 0.0

    def call(arena, q, positions, table):
        return pallas_triton.paged_attention(
            arena, q, positions, table, layout, *args, q.dtype, config=config, interpret=INTERPRET
        )

    calls = 5 * UNROLL if ON_GPU else SETS
    unroll = min(UNROLL, calls)

    def run(arena, q, positions, *tables):
        traced = jax.jit(call)  # once, not once a call

        def body(_, q):
            for i in range(unroll):
                q = traced(arena, q, positions, tables[i % SETS])  # the next call needs this one's result
            return q

        return lax.fori_loop(0, calls // unroll, body, q)

    def define(arena, q, positions, table):
        return reference.paged_attention(arena, q, positions, table, layout, *args)

    keys = min(context, spec.window + tokens - 1) if spec.window else context
    return Job(
        what="prefill",
        shape=f"{spec.name} {rows} x {tokens} of {context}",
        how=shown(config),
        run=run,
        args=(q, positions, *tables),
        frame_words=spec.frame_words,
        calls=calls,
        moved_bytes=rows * keys * spec.num_kv_heads * spec.head_dim * 4,
        flops=4 * rows * spec.num_heads * spec.head_dim * int(seen_keys(spec, context, tokens).sum()),
        pair=(call, define) if config is None else None,
    )


def decode_job(
    arenas, spec: AttentionSpec, rows: int, context: int, how: str, config: DecodeConfig | None = None
) -> Job:
    """Returns the job of one new token at the end of ``context`` for each of ``rows`` rows, rope and KV write too."""
    layout, arena = spec.layout(), arenas[spec.frame_words]
    tables = places(arena.shape[0], (rows, context // layout.block_tokens, layout.layer_frames), SETS)
    positions = jnp.full(rows, context - 1, jnp.int32)
    q, k, v = (
        jax.random.normal(jax.random.key(i), (rows, heads, spec.head_dim), jnp.bfloat16)
        for i, heads in enumerate((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads))
    )
    cos, sin = (jnp.full((rows, spec.head_dim // 2), x, jnp.float32) for x in (0.6, 0.8))
    module = reference if how == "xla" else pallas_triton
    options = {} if how == "xla" else {"config": config, "interpret": INTERPRET}

    def step(module, arena, q, positions, table, **options):
        args = q, k, v, cos, sin, positions, table, layout, spec.score_scale, spec.window, 0.0, q.dtype
        return module.decode_attention(arena, *args, **options)

    calls = (SETS if how == "xla" else 5 * UNROLL) if ON_GPU else SETS
    unroll = min(UNROLL, calls)

    def run(arena, q, positions, *tables):
        traced = jax.jit(partial(step, module, **options))

        def body(_, carry):
            for i in range(unroll):
                carry = traced(*carry, positions, tables[i % SETS])
            return carry

        return lax.fori_loop(0, calls // unroll, body, (arena, q))

    both = (lambda *args: step(module, *args, **options)[1]), (lambda *args: step(reference, *args)[1])
    return Job(
        what="decode",
        shape=f"{spec.name} {rows} of {context}",
        how=how if how == "xla" else shown(config),
        run=run,
        args=(q, positions, *tables),
        frame_words=spec.frame_words,
        donates=True,
        calls=calls,
        moved_bytes=rows * int(seen_keys(spec, context, 1)[0]) * spec.num_kv_heads * spec.head_dim * 4,
        pair=both if config is None and how != "xla" else None,
    )


def write_job(arenas, spec: AttentionSpec, tokens: int, rotates: bool, how: str) -> Job:
    """Returns the job of writing one layer's keys and values of ``tokens`` tokens."""
    layout, arena = spec.layout(), arenas[spec.frame_words]
    (frames,) = places(arena.shape[0], (tokens, layout.layer_frames), 1)
    slots = jnp.arange(tokens, dtype=jnp.int32) % layout.block_tokens
    k, v, q = (
        jax.random.normal(jax.random.key(i), (tokens, heads, spec.head_dim), jnp.bfloat16)
        for i, heads in enumerate((spec.num_kv_heads, spec.num_kv_heads, spec.num_heads))
    )
    cos = jnp.full((tokens, spec.head_dim // 2), 0.6, jnp.float32)
    sin = jnp.full((tokens, spec.head_dim // 2), 0.8, jnp.float32)
    module = reference if how == "xla" else pallas_triton
    options = {} if how == "xla" else {"interpret": INTERPRET}
    calls = 10 * UNROLL if ON_GPU else 4
    unroll = min(UNROLL, calls)

    @jax.jit
    def write(arena, q):
        if rotates:
            return module.rotate_and_write_kv(arena, frames, slots, cos, sin, q, k, v, layout, **options)
        return module.write_kv(arena, frames, slots, k, v, layout, **options), q

    def run(arena, q):
        def body(_, carry):
            for _ in range(unroll):
                carry = write(*carry)
            return carry

        return lax.fori_loop(0, calls // unroll, body, (arena, q))

    values = tokens * spec.head_dim * (2 * spec.num_kv_heads + rotates * spec.num_heads)
    return Job(
        what="rotate + KV write" if rotates else "KV write",
        shape=f"{spec.name} {tokens} tokens",
        how=how,
        run=run,
        args=(q,),
        frame_words=spec.frame_words,
        donates=True,
        calls=calls,
        moved_bytes=2 * 2 * values,
    )


def frame_jobs(arenas, frame_words: int, moved_bytes: int, how: str, config=None) -> list[Job]:
    """Returns the jobs of gathering and scattering ``moved_bytes`` of frames."""
    count = moved_bytes // (4 * frame_words)
    sets = places(arenas[frame_words].shape[0], (count,), 2)
    staged = jax.random.bits(jax.random.key(0), (count, frame_words), jnp.uint32) & jnp.uint32(FINITE)
    module = frames_reference if how == "xla" else frames_triton
    options = {} if how == "xla" else {"config": config or frames_triton.Config(), "interpret": INTERPRET}
    rounds = 20 if ON_GPU else 1

    def gather(arena, *sets):
        def body(_, carry):
            zero, out = carry
            for frames in sets:
                out = module.gather_frames(arena, frames + zero, **options)
                zero = (out[0, 0] == jnp.uint32(0x9E3779B9)).astype(jnp.int32)  # keeps each call, in order
            return zero, out

        return lax.fori_loop(0, rounds, body, (jnp.int32(0), jnp.zeros((count, frame_words), jnp.uint32)))[1]

    def scatter(arena, staged, *sets):
        def body(_, arena):
            for frames in sets:
                arena = module.scatter_frames(arena, staged, frames, **options)
            return arena

        return lax.fori_loop(0, rounds, body, arena)

    named = {
        "shape": f"{count} frames of {4 * frame_words >> 10} KiB",
        "how": how if how == "xla" else shown(config),
        "frame_words": frame_words,
        "calls": 2 * rounds,
        "moved_bytes": 2 * moved_bytes,
    }
    return [
        Job(what="gather", run=gather, args=tuple(sets), **named),
        Job(what="scatter", run=scatter, args=(staged, *sets), donates=True, **named),
    ]


def copy_job() -> Job:
    """Returns the job of the ceiling: an array much larger than the L2 cache read, and written."""
    words = 1 << 28 if ON_GPU else 1 << 14
    rounds = 40 if ON_GPU else 1

    def run(x):
        return lax.fori_loop(0, rounds, lambda i, x: x ^ i.astype(jnp.uint32), x)

    x = jax.random.bits(jax.random.key(2), (words,), jnp.uint32)
    shape = f"{4 * words >> 20} MiB"
    return Job(what="copy", shape=shape, how="xla", run=run, args=(x,), calls=rounds, moved_bytes=8 * words)


def make_jobs(arenas, sweep: bool) -> list[Job]:
    found = [copy_job()]
    rows, context = (16, 4096) if ON_GPU else (1, 64)
    chunk = 2048 if ON_GPU else 32
    attention, decode = partial(attention_job, arenas), partial(decode_job, arenas)
    for spec in SPECS.values():
        found.append(decode(spec, rows, context, "triton"))
        found.append(attention(spec, 1, chunk, chunk))
    qwen = SPECS["qwen1.5-moe"]
    if ON_GPU:
        found += [decode(qwen, b, 2048, "triton") for b in (1, 4, 16)]
        found += [attention(qwen, 1, t, c) for t, c in ((128, 2048), (128, 8192), (512, 8192), (2048, 8192))]
        found += [decode(qwen, rows, context, "xla")]
    for tokens, rotates, how in itertools.product((16, 2048) if ON_GPU else (4,), (False, True), ("triton", "xla")):
        found.append(write_job(arenas, qwen, tokens, rotates, how))
    moved_bytes = 256 << 20 if ON_GPU else 1 << 16
    for frame_words, how in itertools.product((4096, 2048), ("triton", "xla")):
        found += frame_jobs(arenas, frame_words, moved_bytes, how)
    return found + (sweep_jobs(arenas, rows, context, chunk, moved_bytes) if sweep else [])


def sweep_jobs(arenas, rows: int, context: int, chunk: int, moved_bytes: int) -> list[Job]:
    """Returns the same operations in other program sizes."""
    found = []
    for spec in SPECS.values():
        widest = 2**13 // spec.head_dim
        tiles = [t for t in (widest // 2, widest, 2 * widest) if t >= 16]
        for tile, warps, flying in itertools.product(tiles, (2, 4, 8), (1, 2, 3)):
            config = DecodeConfig(tile_tokens=tile, num_warps=warps, tiles_in_flight=flying)
            found.append(decode_job(arenas, spec, rows, context, "triton", config))
        for many, tile, warps, stages in itertools.product((64, 128), tiles, (4, 8), (2, 3)):
            config = Config(rows=many, tile_tokens=tile, split_tokens=chunk, num_warps=warps, num_stages=stages)
            found.append(attention_job(arenas, spec, 1, chunk, chunk, config))
    for frame_words, words, warps in itertools.product((4096, 2048), (1024, 2048, 4096), (2, 4, 8)):
        if words <= frame_words:
            config = frames_triton.Config(words=words, num_warps=warps)
            found += frame_jobs(arenas, frame_words, moved_bytes, "triton", config)
    return found


def relative_error(out, ref) -> float:
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    return float(np.linalg.norm(out - ref) / np.linalg.norm(ref))
