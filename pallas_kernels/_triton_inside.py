# SPDX-License-Identifier: Apache-2.0
"""What Triton can and Pallas does not offer: loads from computed addresses, gathers, a bound on a thread's registers.

Beside ``_triton`` the only door to JAX's inside (its lowering of Pallas to Triton, JAX 0.10 to 0.11): replace it here
when that changes. Nothing of this can be interpreted.
"""

import jax
import jax.numpy as jnp
from jax import core, tree_util
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax._src.lib.triton import dialect as tt_dialect
from jax._src.pallas.triton import lowering
from jax._src.state.types import ReadEffect, TransformedRef, WriteEffect
from jax.extend.core import Primitive

PTX_LOADS = {
    "float16": "ld.global.nc.b16 h, [p]; cvt.f32.f16 $0, h;",
    "bfloat16": "ld.global.nc.b16 h, [p]; mov.b32 $0, {z, h};",
    "float32": "ld.global.nc.f32 $0, [p];",
}

load_from_p = Primitive("load_from")
limit_registers_p = Primitive("limit_registers")
gather_shared_p = Primitive("gather_shared")


def load_from(place, index: jax.Array, dtype) -> jax.Array:
    """Returns float32: the element of ``dtype``, counted from where ``place`` begins, that ``index`` names.

    One multiplication makes an address, where an indexed load takes four or more instructions in a large array, and
    equal loads of one thread become one. The memory must not change while the kernel runs.

    Args:
      place: a view ``ref.at[indices]``, of any dtype.
      index: int32, not negative; ``place`` and ``index`` broadcast.
      dtype: float16, bfloat16 or float32.
    """
    args_flat, tree = tree_util.tree_flatten((place.ref, tuple(place.transforms), index))
    return load_from_p.bind(*args_flat, tree=tree, dtype=jnp.dtype(dtype).name)


@load_from_p.def_effectful_abstract_eval
def _(*avals_flat, tree, dtype):
    ref, transforms, index = tree.unflatten(avals_flat)
    shape = jnp.broadcast_shapes(TransformedRef(ref, transforms).shape, index.shape)
    return core.ShapedArray(shape, jnp.float32), {ReadEffect(0)}


@lowering.register_lowering(load_from_p)
def _(ctx, *args_flat, tree, dtype):
    pointer, [indexer], index = tree.unflatten(args_flat)
    [result] = ctx.avals_out
    pointers = lowering._compute_pointers_from_indices(pointer, ctx.block_infos[0], indexer)
    return tt_dialect.elementwise_inline_asm(
        [mlir.aval_to_ir_type(ctx.context.mlir_ctx, result)],
        "{ .reg .b64 p; .reg .b16 h, z; mov.b16 z, 0; "
        f"mad.wide.u32 p, $2, {jnp.dtype(dtype).itemsize}, $1; {PTX_LOADS[dtype]} }}",
        constraints="=f,l,r",
        pure=True,
        packed_element=1,
        args=[lowering._bcast_to(value, result.shape) for value in (pointers, index)],
    )


def limit_registers(index: jax.Array, registers: int) -> jax.Array:
    """Returns ``index``, and bounds the registers of a thread of the kernel that it is called in.

    The compiler takes up to 255 to hide latencies within a warp; fewer let more warps run and hide each other's. What
    does not fit is spilled.
    """
    return limit_registers_p.bind(index, registers=registers)


@limit_registers_p.def_abstract_eval
def _(index, *, registers):
    return core.ShapedArray(index.shape, index.dtype)


@lowering.register_lowering(limit_registers_p)
def _(ctx, index, *, registers):
    module = ir.InsertionPoint.current.block.owner.operation
    while module.name != "builtin.module":
        module = module.parent.operation
    module.attributes["ttg.maxnreg"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), registers)
    return index


def gather_shared(table: jax.Array, index: jax.Array) -> jax.Array:
    """Returns ``table[index]`` of a vector in registers, which passes through shared memory.

    Args:
      table: one-dimensional, of any dtype.
      index: int32, one-dimensional, and within it.
    """
    return gather_shared_p.bind(table, index)


@gather_shared_p.def_abstract_eval
def _(table, index):
    return core.ShapedArray(index.shape, table.dtype)


@lowering.register_lowering(gather_shared_p)
def _(ctx, table, index):
    [result] = ctx.avals_out
    return tt_dialect.GatherOp(table, index, 0, results=[mlir.aval_to_ir_type(ctx.context.mlir_ctx, result)]).result


asm_at_p = Primitive("asm_at")
asm_at_p.multiple_results = True
asm_like_p = Primitive("asm_like")
asm_like_p.multiple_results = True


def asm_at(place, text: str, value: jax.Array | None = None) -> None:
    """Runs PTX with effects once a thread.

    Args:
      place: a view of one element, one-dimensional, whose address is ``$1``.
      text: the instructions.
      value: int32[1], ``$2``.
    """
    value = jnp.zeros(1, jnp.int32) if value is None else value
    args_flat, tree = tree_util.tree_flatten((place.ref, tuple(place.transforms), value))
    asm_at_p.bind(*args_flat, tree=tree, text=text)


@asm_at_p.def_effectful_abstract_eval
def _(*avals_flat, tree, text):
    return [], {WriteEffect(0)}


@lowering.register_lowering(asm_at_p)
def _(ctx, *args_flat, tree, text):
    pointer, [indexer], value = tree.unflatten(args_flat)
    pointers = lowering._compute_pointers_from_indices(pointer, ctx.block_infos[0], indexer)
    text += " mov.b32 $0, 0;"
    tt_dialect.elementwise_inline_asm(
        [value.type], text, constraints="=r,l,r", pure=False, packed_element=1, args=[pointers, value]
    )
    return []


def asm_like(like: jax.Array, text: str, dtype=jnp.int32, results: int = 1, pack: int = 1) -> list[jax.Array]:
    """Returns what PTX makes of ``pack`` consecutive elements of ``like`` at a time, laid out like it.

    Args:
      like: int32.
      text: the instructions; registers are those of the first result, of the others, then of ``like``.
      dtype: of the results, int32 or float32.
      results: how many.
      pack: elements of one register each.
    """
    return asm_like_p.bind(like, text=text, dtype=jnp.dtype(dtype).name, results=results, pack=pack)


@asm_like_p.def_abstract_eval
def _(like, *, text, dtype, results, pack):
    return [core.ShapedArray(like.shape, jnp.dtype(dtype))] * results


@lowering.register_lowering(asm_like_p)
def _(ctx, like, *, text, dtype, results, pack):
    letter = "f" if dtype == "float32" else "r"
    made = tt_dialect.elementwise_inline_asm(
        [mlir.aval_to_ir_type(ctx.context.mlir_ctx, aval) for aval in ctx.avals_out],
        text,
        constraints=",".join([f"=&{letter}"] * (results * pack) + ["r"] * pack),
        pure=False,
        packed_element=pack,
        args=[like],
    )
    return [made] if results == 1 else list(made)
