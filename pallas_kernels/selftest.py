# SPDX-License-Identifier: Apache-2.0
"""Runs every kernel against its definition on the machine at hand."""

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Lock

import jax
import jax.numpy as jnp

from pallas_kernels.cases import KernelCase, relative_error

KERNELS = ("moe_ffn", "paged_attention", "frames", "dense", "routing", "expert_trace", "tokens")
"""The packages, each with a module ``cases``."""


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """What came of one case.

    Attributes:
      kernel, name, tolerance: of the case.
      dtype: the narrowest floating one among its arguments, or that of the words where there are none.
      error: the largest relative error of any result; None where there is no number.
      microseconds: of a call from the host, the fastest of some in a row; None where kernels are interpreted.
      failure: why there is none, in one line.
    """

    kernel: str
    name: str
    tolerance: float
    dtype: str | None = None
    error: float | None = None
    microseconds: float | None = None
    failure: str | None = None

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.tolerance


def list_cases(interpret: bool, kernel: str | None = None) -> list[KernelCase]:
    """Returns the cases of all kernels, or of one.

    Args:
      interpret: small sizes and interpreted kernels, which run anywhere; else real sizes, compiled for an NVIDIA GPU.
      kernel: one of ``KERNELS``.
    """
    from pallas_kernels.dense import cases as dense
    from pallas_kernels.expert_trace import cases as expert_trace
    from pallas_kernels.frames import cases as frames
    from pallas_kernels.moe_ffn import cases as moe_ffn
    from pallas_kernels.paged_attention import cases as paged_attention
    from pallas_kernels.routing import cases as routing
    from pallas_kernels.tokens import cases as tokens

    rooms = dict(zip(KERNELS, (moe_ffn, paged_attention, frames, dense, routing, expert_trace, tokens), strict=True))
    return [case for name, room in rooms.items() if kernel in (None, name) for case in room.cases(interpret)]


def run_case(
    case: KernelCase, *, seed: int = 0, timed: bool = False, turn: AbstractContextManager | None = None
) -> CaseResult:
    """Returns what came of a case; an exception is a failure of the case.

    Args:
      case: what to run.
      seed: of its arguments.
      timed: measure calls as well.
      turn: held while Python lowers or the device runs, not while XLA compiles: cases side by side leave the clock be.
    """
    about = {"kernel": case.kernel, "name": case.name, "tolerance": case.tolerance}
    turn = turn or nullcontext()
    try:
        args = case.make_args(seed)
        about["dtype"] = _narrowest_dtype(args)
        with turn:
            lowered = [jax.jit(f).lower(*args) for f in (case.run, case.reference)]
        run, reference = (each.compile(compiler_options=_compiler_options()) for each in lowered)
        with turn:
            found, expected = jax.block_until_ready((run(*args), reference(*args)))
            if timed:
                about["microseconds"] = _microseconds(lambda: run(*args))
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        error = max(relative_error(out, ref) for out, ref in pairs)
        if math.isinf(error):
            return CaseResult(**about, failure="not all results are finite")
        return CaseResult(**about, error=error)
    except Exception as error:  # a kernel that does not compile here is what a self-test is for
        lines = str(error).strip().splitlines() or [""]
        return CaseResult(**about, failure=f"{type(error).__name__}: {lines[0]}")


def run_cases(
    cases: list[KernelCase], *, timed: bool = False, tell: Callable[[CaseResult], None] = lambda result: None
) -> list[CaseResult]:
    """Returns what came of the cases, in their order; they are compiled side by side and run one at a time.

    Args:
      cases: what to run.
      timed: measure calls as well.
      tell: called with each result as it comes.
    """
    turn = Lock()
    pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1))
    try:
        futures = [pool.submit(run_case, case, timed=timed, turn=turn) for case in cases]
        for future in as_completed(futures):
            tell(future.result())
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt waits for the cases that run, not for all
    return [future.result() for future in futures]


def _compiler_options() -> dict[str, object] | None:
    """Returns what spares a GPU the search for the fastest of XLA's products: only kernels are timed."""
    return {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None


def _narrowest_dtype(args) -> str:
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(args)]
    floating = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    return str(min(floating, key=lambda dtype: dtype.itemsize, default=dtypes[0]))


def _microseconds(call: Callable, calls: int = 20, rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)  # the last one of the stream
        times.append((time.perf_counter() - start) / calls * 1e6)
    return min(times)  # the host, which compiles what is next, only adds to it
