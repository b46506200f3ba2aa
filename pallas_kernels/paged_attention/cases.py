# SPDX-License-Identifier: Apache-2.0
"""What the attention kernels are held to their definition on."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import KernelCase
from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.arg_specs import SPECS, AttentionSpec
from pallas_kernels.paged_attention.layout import KVLayout, from_words, to_words

POISON = 0xFFFFFFFF
"""What nobody may read: NaN in every dtype."""

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}

TINY = [
    AttentionSpec(name="tiny", num_heads=6, num_kv_heads=2, head_dim=16, frame_words=128),
    AttentionSpec(name="tiny sliding", num_heads=2, num_kv_heads=2, head_dim=16, frame_words=512, window=33, scale=1.0),
]

write = jax.jit(reference.write_kv, static_argnames="layout")


def random_cache(layout: KVLayout, last_B, first_B=None, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Returns (arena, table_BGF): keys first (0) .. last of each row in frames in random order; all else is ``POISON``.

    Blocks without such keys have no frames: their entries are A.
    """
    rng = np.random.default_rng(seed)
    first_B = np.zeros_like(last_B) if first_B is None else first_B
    num_rows, num_blocks = len(last_B), -(-(max(last_B) + 1) // layout.block_tokens)
    num_frames = num_rows * num_blocks * layout.layer_frames + 3
    table = rng.permutation(num_frames)[: num_frames - 3].reshape(num_rows, num_blocks, -1).astype(np.int32)
    arena = jnp.full((num_frames, layout.frame_words), POISON, jnp.uint32)
    rows = np.repeat(np.arange(num_rows), [b - a + 1 for a, b in zip(first_B, last_B, strict=True)])
    positions = np.concatenate([np.arange(a, b + 1) for a, b in zip(first_B, last_B, strict=True)])
    blocks, slots = np.divmod(positions, layout.block_tokens)
    k, v = rng.standard_normal((2, len(rows), layout.num_kv_heads, layout.head_dim), np.float32)
    arena = write(arena, jnp.asarray(table[rows, blocks]), jnp.asarray(slots, jnp.int32), k, v, layout)
    unused = np.ones(table.shape[:2], bool)
    unused[rows, blocks] = False
    table[unused] = num_frames
    return arena, jnp.asarray(table)


def make_queries(spec: AttentionSpec, dtype: str, seed: int, *, last_B, num_tokens: int) -> tuple:
    """Returns arena, q, positions and table: each row's last queries; those before its first token see nothing."""
    layout, last = spec.layout(dtype), np.asarray(last_B)
    seen_from = last - num_tokens + 1  # position of a row's first query
    first = np.maximum(seen_from - spec.window + 1, 0) if spec.window else None  # older blocks are given back
    arena, table = random_cache(layout, last, first, seed)
    positions = np.maximum(seen_from[:, None] + np.arange(num_tokens), -1)
    shape = len(last), num_tokens, spec.num_heads, spec.head_dim
    q = np.random.default_rng(seed + 1).standard_normal(shape, np.float32)
    return arena, jnp.asarray(q, dtype), jnp.asarray(positions, jnp.int32), table


def attend(run, spec: AttentionSpec, dtype: str, *args, **options):
    return run(*args, spec.layout(dtype), spec.score_scale, spec.window, 0.0, jnp.float32, **options)


def turns(spec: AttentionSpec, num_tokens: int, rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine of random angles, each float32[num_tokens, M/2]."""
    angles = rng.uniform(0, 6, (num_tokens, spec.head_dim // 2))
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def new_tokens(spec: AttentionSpec, dtype: str, num_tokens: int, rng: np.random.Generator) -> list[jax.Array]:
    """Returns q, k and v of new tokens, before rope."""
    heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
    return [jnp.asarray(rng.standard_normal((num_tokens, n, spec.head_dim), np.float32), dtype) for n in heads]


def make_step(spec: AttentionSpec, dtype: str, seed: int, *, last_B) -> tuple:
    """Returns the arrays of ``decode_attention``, with what its rows had at their positions before."""
    rng = np.random.default_rng(seed + 1)
    arena, _, positions, table = make_queries(spec, dtype, seed, last_B=last_B, num_tokens=1)
    q, k, v = new_tokens(spec, dtype, len(last_B), rng)
    return arena, q, k, v, *turns(spec, len(last_B), rng), positions[:, 0], table


def decode(run, spec: AttentionSpec, dtype: str, *args, **options):
    """Returns what the rows see, and the values that lie at their positions afterwards, zeros where there is no row."""
    layout, positions, table = spec.layout(dtype), args[-2], args[-1]
    arena, out = run(*args, layout, spec.score_scale, spec.window, 0.0, jnp.float32, **options)
    places = jnp.maximum(positions, 0)
    blocks = from_words(arena[table[jnp.arange(len(places)), places // layout.block_tokens]], dtype)
    blocks = blocks.reshape(len(places), -1, layout.block_tokens, layout.head_dim)
    written = blocks[jnp.arange(len(places)), :, places % layout.block_tokens]
    return out, jnp.where(positions[:, None, None] < 0, 0, written)


def make_writes(spec: AttentionSpec, dtype: str, seed: int, *, num_tokens: int) -> tuple:
    """Returns the arrays of ``rotate_and_write_kv``; the second token's row is not in use."""
    layout, rng = spec.layout(dtype), np.random.default_rng(seed)
    num_frames = num_tokens * layout.layer_frames + 3
    values = rng.standard_normal((num_frames, layout.frame_words * 4 // jnp.dtype(dtype).itemsize), np.float32)
    frames = rng.permutation(num_frames)[:-3].reshape(num_tokens, -1)
    frames[1] = num_frames
    cos, sin = turns(spec, num_tokens, rng)
    q, k, v = new_tokens(spec, dtype, num_tokens, rng)
    slots = jnp.asarray(rng.integers(0, layout.block_tokens, num_tokens), jnp.int32)
    return to_words(jnp.asarray(values, dtype)), jnp.asarray(frames, jnp.int32), slots, cos, sin, q, k, v


def write_only(run, spec: AttentionSpec, dtype: str, arena, frames, slots, cos, sin, q, k, v, **options):
    return run(arena, frames, slots, k, v, spec.layout(dtype), **options)


def rotate_and_write(run, spec: AttentionSpec, dtype: str, *args, **options):
    """Returns the arena's values, not its words: a turned key may round to the next one."""
    arena, q = run(*args, spec.layout(dtype), **options)
    return from_words(arena, dtype), q


def cases(interpret: bool) -> list[KernelCase]:
    """Returns decoding with rows of several lengths and one that is not in use, chunks of prompts, and writes."""
    from pallas_kernels.paged_attention import pallas_triton  # JAX may be without Triton: ask only when it is wanted

    if interpret:
        chosen, chunk, written = list(zip(TINY, TOLERANCE)), 24, 3
        contexts = [255, 256, -1, 0, 319]
    else:
        chosen, chunk, written = [(spec, "bfloat16") for spec in SPECS.values()], 256, 16
        contexts = [255, 256, -1, 0, 4095]
    found = []
    for spec, dtype in chosen:

        def add(name, function, call, make_args, tolerance, which=(spec, dtype)):
            found.append(
                KernelCase(
                    kernel="paged_attention",
                    name=f"{name}, {which[0].name}",
                    make_args=partial(make_args, *which),
                    run=partial(call, getattr(pallas_triton, function), *which, interpret=interpret),
                    reference=partial(call, getattr(reference, function), *which),
                    tolerance=tolerance,
                )
            )

        tokens, tolerance = partial(make_writes, num_tokens=written), TOLERANCE[dtype]
        steps = partial(make_step, last_B=contexts)
        add(f"decode of {len(contexts)} rows", "decode_attention", decode, steps, tolerance)
        chunks = partial(make_queries, last_B=[contexts[-1] - chunk, chunk // 2], num_tokens=chunk)
        add(f"2 chunks of {chunk} tokens", "paged_attention", attend, chunks, tolerance)
        add(f"write of {written} tokens", "write_kv", write_only, tokens, 0.0)
        add(f"rope and write of {written} tokens", "rotate_and_write_kv", rotate_and_write, tokens, tolerance)
    return found
