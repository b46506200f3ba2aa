# SPDX-License-Identifier: Apache-2.0
"""The verb that runs every kernel against its definition on the machine at hand."""

import argparse
import time
from dataclasses import asdict
from functools import partial

from rich.console import Console
from rich.text import Text

from pagedweight_jax.cli.common import print_json
from pagedweight_jax.errors import UserError


def add_verbs(verbs) -> None:
    """Adds ``selftest`` to the sub-parsers ``verbs``."""
    verb = verbs.add_parser("selftest", help="run every kernel against its definition on this machine")
    verb.set_defaults(run=selftest)
    verb.add_argument("--kernel", metavar="NAME", help="one kernel (default: all)")
    verb.add_argument("--json", action="store_true", help="print JSON")


def selftest(args: argparse.Namespace) -> int:
    """Returns 0 where all kernels give what they should, else 1."""
    import jax

    from pagedweight_jax.serving.implementation import default_implementation
    from pallas_kernels.selftest import KERNELS, list_cases, run_cases

    if args.kernel not in (None, *KERNELS):
        raise UserError(f"there is no kernel {args.kernel!r}; there are {', '.join(KERNELS)}")
    start, compiled = time.perf_counter(), default_implementation() == "triton"
    cases = list_cases(interpret=not compiled, kernel=args.kernel)
    device, console = jax.devices()[0].device_kind, Console(highlight=False, soft_wrap=True, quiet=args.json)
    columns = column_format(cases, timed=compiled)
    print_head(console, f"{device}, JAX {jax.__version__}", columns, compiled)
    results = run_cases(cases, timed=compiled, tell=partial(print_row, console, columns))
    summary = {
        "device": device,
        "jax": jax.__version__,
        "default_implementation": default_implementation(),
        "interpreted": not compiled,
        "passed": all(result.passed for result in results),
        "seconds": round(time.perf_counter() - start, 1),
        "cases": [asdict(result) | {"passed": result.passed} for result in results],
    }
    passed = sum(result.passed for result in results)
    line = f"{passed} of {len(results)} cases passed in {summary['seconds']:.0f} s"
    console.print(line, style="bold green" if summary["passed"] else "bold red")
    if args.json:
        print_json(summary)
    return 0 if summary["passed"] else 1


def column_format(cases: list, timed: bool) -> str:
    """Returns the format of a line up to its verdict; without the times where kernels are interpreted."""
    kernel, name = (max((len(getattr(case, field)) for case in cases), default=0) for field in ("kernel", "name"))
    return f"{{:{kernel}}}  {{:{name}}}  {{:8}}{{:>9}}{{:>11}}" + "{:>11}" * timed


def print_head(console: Console, machine: str, columns: str, timed: bool) -> None:
    """Prints what runs, and the columns' names."""
    if timed:
        title, note = "kernels against their definition", "Times are of calls from the host, the fastest 20 in a row."
    else:
        title, note = "kernels interpreted at small sizes", "It serves with their definition; they need an NVIDIA GPU."
    console.print(f"{machine}: {title}", style="bold", markup=False)
    console.print(f"{note}\n", style="dim")
    console.print(columns.format("kernel", "case", "dtype", "error", "tolerance", "µs a call"), style="bold")


def print_row(console: Console, columns: str, result) -> None:
    """Prints what came of a case, and where there is no number why."""
    errors = ["-" if error is None else f"{error:.1e}" if error else "0" for error in (result.error, result.tolerance)]
    microseconds = "-" if result.microseconds is None else f"{result.microseconds:.0f}"
    line = Text(columns.format(result.kernel, result.name, result.dtype or "-", *errors, microseconds))
    console.print(line.append("  pass", "green") if result.passed else line.append("  FAIL", "red"))
    if result.failure:
        console.print(f"    {result.failure}", markup=False)
