# SPDX-License-Identifier: Apache-2.0
"""Compiles the attention and frame kernels for an H200 on a machine without a GPU; see ``aot_h200.py``.

    python benchmarks/aot_cases_attention.py

Prints registers, bytes spilled and shared memory's users of each, and fails if one spills or copies the arena.
"""

import shutil
import sys
import time

from aot_h200 import DUMP, NUM_FRAMES, compile_for_h200, resources

# isort: split
# JAX reads what aot_h200 sets when it is imported, so these imports stand below it.
import jax
import jax.numpy as jnp

from pallas_kernels.frames import api as frames
from pallas_kernels.paged_attention import api
from pallas_kernels.paged_attention.arg_specs import SPECS, AttentionSpec, abstract_args

KERNELS = ("attend", "attend_decode", "combine", "write_kv", "rotate_and_write_kv", "gather_frames", "scatter_frames")
SHAPES = (16, 1, 4096), (4, 1, 32768), (1, 2048, 4096), (1, 128, 8192)
"""Rows, queries of each, and tokens that a row may have."""


def attention_step(spec: AttentionSpec, rows: int, tokens: int, context: int, dtype: str):
    """Returns (f, its abstract arguments): a KV write and then new tokens through one layer, the arena first."""
    layout, shape, which = spec.layout(dtype), jax.ShapeDtypeStruct, {"implementation": "triton"}
    arena, q, positions, table = abstract_args(spec, rows, tokens, context, NUM_FRAMES, dtype)

    def step(arena, q, positions, table, cos, sin, k, v, frames_TF, slots_T):
        cut = {"scale": spec.score_scale, "window": spec.window, "dtype": q.dtype} | which
        arena = api.write_kv(arena, frames_TF, slots_T, v, k, layout, **which)
        q_THM = q.reshape(-1, *q.shape[2:])
        if tokens == 1:
            return api.decode_attention(arena, q_THM, k, v, cos, sin, positions[:, 0], table, layout, **cut)
        arena, q_THM = api.rotate_and_write_kv(arena, frames_TF, slots_T, cos, sin, q_THM, k, v, layout, **which)
        return arena, api.paged_attention(arena, q_THM.reshape(q.shape), positions, table, layout, **cut)

    kv = shape((rows * tokens, spec.num_kv_heads, spec.head_dim), dtype)
    frames_TF = shape((rows * tokens, layout.layer_frames), jnp.int32)
    angles = shape((rows * tokens, spec.head_dim // 2), jnp.float32)
    return step, (arena, q, positions, table, angles, angles, kv, kv, frames_TF, shape((rows * tokens,), jnp.int32))


def frame_step(frame_words: int, count: int):
    """Returns (f, its abstract arguments): frames gathered from the arena and scattered to other places."""

    def step(arena, frames_N, to_N):
        staged_NW = frames.gather_frames(arena, frames_N, implementation="triton")
        return frames.scatter_frames(arena, staged_NW, to_N, implementation="triton")

    shape = jax.ShapeDtypeStruct
    indices = shape((count,), jnp.int32)
    return step, (shape((NUM_FRAMES, frame_words), jnp.uint32), indices, indices)


def cases():
    for spec in SPECS.values():
        for rows, tokens, context in SHAPES:
            name = f"{spec.name} {rows} x {tokens} of {context}"
            yield name, *attention_step(spec, rows, tokens, context, "bfloat16")
        yield f"{spec.name} 2 x 1 of 4096 float32", *attention_step(spec, 2, 1, 4096, "float32")
        yield f"{spec.name} 1 x 128 of 4096 float32", *attention_step(spec, 1, 128, 4096, "float32")
    for frame_words in (2048, 4096):
        yield f"4096 frames of {frame_words} words", *frame_step(frame_words, 4096)


def main() -> int:
    failed = False
    print(f"jax {jax.__version__}, H200, arena of {NUM_FRAMES} frames")
    print(f"{'case':48}{'seconds':>8}{'temp bytes':>12}   registers (bytes spilled)")
    for name, f, args in cases():
        start = time.perf_counter()
        compiled, files = compile_for_h200(f, *args, donate_argnums=0)
        seconds = time.perf_counter() - start
        memory = compiled.memory_analysis()
        kernels = {}
        if shutil.which("ptxas"):
            for file in files:
                kernels |= resources(file) if file.stat().st_size else {}  # some modules have no kernel
        kernels = {kernel: used for kernel, used in kernels.items() if kernel in KERNELS}
        shown = ", ".join(f"{kernel} {registers} ({spilled})" for kernel, (registers, spilled) in kernels.items())
        print(f"{name:48}{seconds:>8.1f}{memory.temp_size_in_bytes:>12}   {shown or 'no ptxas'}", flush=True)
        arena_bytes = args[0].size * args[0].dtype.itemsize
        copied = memory.alias_size_in_bytes < arena_bytes or memory.temp_size_in_bytes > arena_bytes // 2
        spilled = [kernel for kernel, (_, bytes_) in kernels.items() if bytes_]
        if copied or spilled:
            print(f"    FAILED: {'the arena is copied' if copied else f'{spilled} spill'}")
        failed |= copied or bool(spilled)
    shutil.rmtree(DUMP, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
