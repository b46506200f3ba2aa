# SPDX-License-Identifier: Apache-2.0
"""The verb that runs every kernel against its definition on the machine at hand."""

import argparse
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from pagedweight_jax.cli.common import print_json, progress_bars, titled_table
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
    compiled = default_implementation() == "triton"
    cases = list_cases(interpret=not compiled, kernel=args.kernel)
    with progress_bars() as (progress, _):
        results = run_cases(cases, timed=compiled, progress=lambda *done: progress("cases", *done))
    summary = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "default_implementation": default_implementation(),
        "interpreted": not compiled,
        "passed": all(result.passed for result in results),
        "cases": [asdict(result) | {"passed": result.passed} for result in results],
    }
    if args.json:
        print_json(summary)
    else:
        print_results(summary)
    return 0 if summary["passed"] else 1


def print_results(summary: dict) -> None:
    """Prints a line a case, what failed and why, and how many passed."""
    console, cases = Console(highlight=False), summary["cases"]
    interpreted = summary["interpreted"]
    machine = f"{summary['device']}, JAX {summary['jax']}"
    if interpreted:
        title, note = "kernels interpreted at small sizes", "It serves with their definition; they need an NVIDIA GPU."
    else:
        title, note = "kernels against their definition", "Times are of calls from the host, one after another."
    console.print(results_table(f"{machine}: {title}", cases, timed=not interpreted))
    console.print(note, style="dim")
    for case in cases:
        if case["failure"]:
            console.print(f"{case['kernel']}, {case['name']}: {case['failure']}", markup=False, soft_wrap=True)
    passed = sum(case["passed"] for case in cases)
    console.print(f"{passed} of {len(cases)} cases passed", style="bold green" if summary["passed"] else "bold red")


def results_table(title: str, cases: list[dict], timed: bool) -> Table:
    """Returns one line a case."""
    table = titled_table(title)
    table.add_column("kernel", no_wrap=True)
    table.add_column("case")
    table.add_column("dtype", no_wrap=True)
    for heading in ("error", "tolerance", *(["µs a call"] if timed else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for case in cases:
        numbers = [case["error"], case["tolerance"]]
        row = ["-" if number is None else f"{number:.1e}" if number else "0" for number in numbers]
        if timed:
            row.append("-" if case["microseconds"] is None else f"{case['microseconds']:.0f}")
        verdict = "[green]pass[/]" if case["passed"] else "[red]FAIL[/]"
        table.add_row(case["kernel"], case["name"], case["dtype"] or "-", *row, verdict)
    return table
