# SPDX-License-Identifier: Apache-2.0
"""The demo, and the figure that it draws."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from pagedweight_jax.cli.common import print_json, progress_bars
from pagedweight_jax.units import parse_size


def add_verbs(verbs) -> None:
    """Adds ``demo`` and ``plot`` to the sub-parsers ``verbs``."""
    verb = verbs.add_parser("demo", help="see weights give way to the KV cache and come back")
    verb.set_defaults(run=demo)
    verb.add_argument(
        "--model",
        metavar="HF_DIR",
        type=Path,
        default=Path("checkpoints/demo-moe"),
        help="what to convert (default checkpoints/demo-moe)",
    )
    verb.add_argument("--out", metavar="DIR", type=Path, default=Path("demo"), help="the results (default demo)")
    verb.add_argument(
        "--memory", metavar="SIZE", type=parse_size, help="budget, as 60MiB (default: the top width and one context)"
    )
    verb.add_argument("--quick", action="store_true", help="a much smaller load and less text")
    verb.add_argument("--json", action="store_true", help="print the summary as JSON instead of tables")

    verb = verbs.add_parser("plot", help="draw a figure from an event log")
    verb.set_defaults(run=plot)
    verb.add_argument("figure", choices=("timeline",), help="which: memory, bits, moves and speed over time")
    verb.add_argument("events", metavar="EVENTS", type=Path, help="events.jsonl of a run")
    verb.add_argument(
        "-o", "--out", metavar="FILE", type=Path, required=True, help="the figure; its suffix says which kind"
    )
    verb.add_argument("--title", metavar="TEXT", default="", help="a line above it")


def demo(args: argparse.Namespace) -> int:
    from pagedweight_jax.demo.run import FULL, QUICK, run_demo

    screen = Console(stderr=True)
    summary = run_demo(
        args.model,
        args.out,
        memory_bytes=args.memory,
        size=QUICK if args.quick else FULL,
        bars=progress_bars,
        screen=screen,
        stdout=Console(quiet=args.json),
    )
    if args.json:
        print_json(summary)
    for problem in summary["problems"]:
        print(f"pagedweight: {args.out / 'events.jsonl'}: {problem}", file=sys.stderr)
    return 1 if summary["problems"] else 0


def plot(args: argparse.Namespace) -> int:
    from pagedweight_jax.demo.timeline import draw_timeline
    from pagedweight_jax.serving.events import read_events

    draw_timeline(read_events(args.events), args.out, args.title)
    return 0
