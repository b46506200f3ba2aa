# SPDX-License-Identifier: Apache-2.0
"""The verbs that make, show and check a paged checkpoint."""

import argparse
import re
import resource
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pagedweight_jax.cli.common import print_json, progress_bars, titled_table
from pagedweight_jax.errors import UserError
from pagedweight_jax.units import format_count, format_size, parse_size

SHOWN_PROBLEMS = 20
"""A folder that is gone is a problem for each of its files."""


def add_verbs(verbs) -> None:
    """Adds ``convert``, ``inspect`` and ``verify`` to the sub-parsers ``verbs``."""
    verb = verbs.add_parser("convert", help="make a paged checkpoint from a Hugging Face folder")
    verb.set_defaults(run=convert)
    verb.add_argument("folder", metavar="HF_DIR", type=Path, help="config.json, safetensors and tokenizer")
    verb.add_argument("out", metavar="OUT", type=Path, help="the checkpoint's folder, made here")
    verb.add_argument("--bits", type=parse_bits, default=(3, 8), help="bitwidths to support (default 3..8)")
    verb.add_argument(
        "--text",
        type=Path,
        help="calibration text: a file (.jsonl: its fields text; .gz, .xz, .zst: packed) or a folder of files "
        "(default HF_DIR/text/calibration.txt)",
    )
    verb.add_argument("--samples", type=int, default=100, help="calibration sequences (default 100)")
    verb.add_argument("--sequence-length", type=int, default=512, help="tokens of each (default 512)")
    verb.add_argument("--seed", type=int, default=0, help="of the choice of sequences (default 0)")
    verb.add_argument(
        "--importance",
        choices=("inputs", "fisher"),
        default="inputs",
        help="what weights an error: inputs (their second moments), or fisher (the loss's gradient at each row as "
        "well, which reads the weights three times) (default inputs)",
    )
    verb.add_argument("--ram", type=parse_size, default="4GiB", help="hidden states held in memory (default 4GiB)")
    verb.add_argument("--overwrite", action="store_true", help="replace a paged checkpoint at OUT")
    verb.add_argument("--dry-run", action="store_true", help="say what it takes, read no weight, write nothing")

    inspect_verb = verbs.add_parser("inspect", help="show what a paged checkpoint holds")
    inspect_verb.set_defaults(run=inspect)
    verify_verb = verbs.add_parser("verify", help="read everything and compare it with its checksums")
    verify_verb.set_defaults(run=verify)
    verify_verb.add_argument("--source", metavar="HF_DIR", type=Path, help="also recompute the errors from this model")
    for one in (inspect_verb, verify_verb):
        one.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a folder that convert made")
    for one in (verb, inspect_verb, verify_verb):
        one.add_argument("--json", action="store_true", help="print JSON")


def parse_bits(text: str) -> tuple[int, int]:
    """Returns (lowest, highest) bitwidth from ``3..8`` or ``4``.

    Raises:
      UserError: it is neither.
    """
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    if not match:
        raise UserError(f"bits {text!r}: write a range like 3..8, or one bitwidth")
    return int(match[1]), int(match[2] or match[1])


def convert(args: argparse.Namespace) -> int:
    from pagedweight_jax.calibrate.convert import run
    from pagedweight_jax.calibrate.prepare import costs, device_peak_bytes, prepare
    from pagedweight_jax.calibrate.stopwatch import Stopwatch
    from pagedweight_jax.checkpoint.draft import nearest_folder

    watch = Stopwatch()
    with progress_bars() as (progress, report):
        job = prepare(
            args.folder,
            args.out,
            bits=args.bits,
            text=args.text,
            samples=args.samples,
            sequence_length=args.sequence_length,
            seed=args.seed,
            importance=args.importance,
            overwrite=args.overwrite,
            ram_bytes=args.ram,
            report=report,
        )
        expected = asdict(costs(job))
        if args.dry_run:
            free_bytes = shutil.disk_usage(nearest_folder(args.out)).free
            print_costs(expected | {"disk_free_bytes": free_bytes}, args.json)
            return 0
        checkpoint = run(job, progress=progress, report=report, watch=watch)
        expected["seconds"], expected["device_peak_bytes"] = watch.seconds, device_peak_bytes()
        expected["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        held = "in memory" if expected["hidden_in_memory"] else "in a file"
        report(
            f"peak host memory {format_size(expected['peak_bytes'])}: one layer of up to "
            f"{format_size(expected['layer_bytes'])}, {format_size(expected['hidden_bytes'])} of hidden states {held}"
        )
        if expected["device_peak_bytes"]:
            report(f"peak device memory {format_size(expected['device_peak_bytes'])}")
        stages = ", ".join(f"{stage} {spent:.1f}" for stage, spent in watch.seconds.items())
        report(f"seconds: {stages} (reading and writing go on beside the rest)")
    return print_checkpoint(checkpoint, args.json, {"conversion": expected})


def print_costs(costs: dict, as_json: bool) -> None:
    """Prints what a conversion would read, write and hold."""
    if as_json:
        print_json(costs)
        return
    held = "held" if costs["hidden_in_memory"] else "mapped"
    hidden = f"{format_size(costs['hidden_bytes'])} of hidden states {held}"
    lines = {
        "reads": f"{format_size(costs['read_bytes'])} of weights, a layer of up to "
        f"{format_size(costs['layer_bytes'])} at a time",
        "writes": f"{format_size(costs['pages_bytes'])} of pages, {format_size(costs['dense_bytes'])} of dense weights",
        "disk": f"up to {format_size(costs['disk_bytes'])}; {format_size(costs['disk_free_bytes'])} free",
        "memory": f"about {format_size(costs['ram_bytes'])}; {hidden}",
        "device": f"about {format_size(costs['device_bytes'])}" if costs["device_bytes"] else "no GPU: all on the host",
    }
    for name, line in lines.items():
        print(f"{name:8}{line}")


def inspect(args: argparse.Namespace) -> int:
    from pagedweight_jax.checkpoint.paged import open_checkpoint

    return print_checkpoint(open_checkpoint(args.checkpoint), args.json)


def verify(args: argparse.Namespace) -> int:
    from pagedweight_jax.calibrate.compare import compare_with_source
    from pagedweight_jax.checkpoint.paged import open_checkpoint, verify

    result = {"path": str(args.checkpoint)}
    with progress_bars() as (progress, _):
        problems = verify(args.checkpoint, progress) or policy_problems(args.checkpoint)
        if args.source is not None and not problems:
            comparison = compare_with_source(open_checkpoint(args.checkpoint), args.source, progress)
            problems = comparison.problems
            result |= {"blocks": comparison.blocks, "worst_relative_difference": comparison.worst}
    if args.json:
        print_json(result | {"ok": not problems, "problems": problems})
    elif not problems:
        print(f"{args.checkpoint}: every array and every file is what was written")
        if args.source is not None:
            print(
                f"{args.source}: its weights; the errors of {result['blocks']} linear-blocks are the stored "
                f"sensitivities to {result['worst_relative_difference']:.1g}"
            )
    for problem in problems[:SHOWN_PROBLEMS]:
        print(problem, file=sys.stderr)
    if len(problems) > SHOWN_PROBLEMS:
        print(f"and {len(problems) - SHOWN_PROBLEMS} more; --json lists all", file=sys.stderr)
    return 2 if problems else 0


def policy_problems(folder: Path) -> list[str]:
    """Returns what is wrong with the policy.json of a checkpoint that is sound otherwise; empty if it has none."""
    from pagedweight_jax.checkpoint.paged import open_checkpoint
    from pagedweight_jax.checkpoint.policy import load_calibration

    try:
        load_calibration(open_checkpoint(folder))
    except UserError as error:
        return [str(error)]
    return []


def print_checkpoint(checkpoint, as_json: bool, more: dict | None = None) -> int:
    from pagedweight_jax.checkpoint.summary import summarize

    summary = summarize(checkpoint)
    if as_json:
        print_json({"path": str(checkpoint.path), **summary, **(more or {})})
        return 0
    console = Console(highlight=False)
    console.print(checkpoint.path, style="bold", markup=False, soft_wrap=True)
    console.print(facts_table(summary))
    console.print()
    console.print(coverage_table(summary["calibration"]))
    console.print(widths_table(summary))
    console.print("gate_up, down: one linear-block. LUTs, padding: shares. static: one LUT kept.", style="dim")
    return 0


def _policy_line(policy: dict | None) -> str:
    if policy is None:
        return "none: global damage alone decides (pagedweight calibrate makes one)"
    run, rules = policy["run"], policy["policy"]
    multipliers, floors = rules["multipliers"], sorted(set(rules["floors"]))
    return (
        f"{len(multipliers)} buckets of experts, multipliers {multipliers[0]:.3g} to {multipliers[-1]:.3g}, "
        f"floors {', '.join(map(str, floors))} bits; measured on {run['samples']} sequences of "
        f"{run['sequence_length']} tokens, text {run['text_sha256'][:12]}"
    )


def facts_table(summary: dict) -> Table:
    """Returns the model, its files and its calibration, a line each."""
    model, blocks, versions = summary["model"], summary["blocks"], summary["versions"]
    calibration = summary["calibration"]
    tokens, missed = calibration["tokens_per_expert"], calibration["uncalibrated_experts"]
    packages = ", ".join(f"{name} {number}" for name, number in versions.items() if name not in ("format", "layout"))
    facts = {
        "model": f"{model['family']}: {model['layers']} layers, hidden {model['hidden_size']}, "
        f"vocabulary {model['vocab_size']}, context {model['max_position_embeddings']} tokens",
        "experts": f"{model['experts']} of width {model['expert_width']} in each of {model['sparse_layers']} layers, "
        f"{model['experts_per_token']} per token; shared expert {model['shared_expert_width'] or 'none'}",
        "parameters": f"{format_count(model['paged_parameters'])} in pages, "
        f"{format_count(model['dense_parameters'])} dense",
        "dense weights": f"{format_size(summary['dense_bytes'])} of {', '.join(summary['dense_dtypes'])}",
        "frames": f"{format_size(summary['frame_bytes'])}; "
        + ", ".join(f"{name} {b['rows']}x{b['columns']} takes {b['frames']}" for name, b in blocks.items()),
        "on disk": format_size(summary["disk_bytes"]),
        "calibration": f"{calibration['samples']} sequences of {calibration['sequence_length']} tokens, "
        f"seed {calibration['seed']}, text {calibration['text_sha256'][:12]}; importance: {calibration['importance']}",
        "coverage": f"{calibration['experts']} experts saw {tokens['fewest']} to {tokens['most']} tokens, median "
        f"{tokens['median']:.0f}; {missed} saw fewer than {calibration['min_tokens']}",
        "online policy": _policy_line(summary["policy"]),
        "written by": f"{packages}; format {versions['format']}, layout {versions['layout']}",
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, fact in facts.items():
        table.add_row(name, fact)
    return table


def coverage_table(calibration: dict) -> Table:
    """Returns how many calibration tokens the experts of each layer saw."""
    table = titled_table("Calibration tokens per expert")
    for heading in ("layer", "fewest", "median", "most", f"under {calibration['min_tokens']}"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in calibration["layers"]:
        tokens, share = layer["tokens_per_expert"], layer["uncalibrated_share"]
        table.add_row(
            str(layer["layer"]), str(tokens["fewest"]), f"{tokens['median']:.0f}", str(tokens["most"]), f"{share:.0%}"
        )
    return table


def widths_table(summary: dict) -> Table:
    """Returns the M table: what one linear-block of each kind, and all routed experts, take at each bitwidth."""
    table = titled_table("Device memory by bitwidth")
    table.add_column("bits", justify="right", no_wrap=True, style="bold")
    for heading in (*summary["blocks"], "experts", "bits/w", "LUTs", "padding", "static"):
        table.add_column(heading, justify="right", no_wrap=True)
    for width in summary["widths"]:
        table.add_row(
            str(width["bits"]),
            *(format_size(width["block_bytes"][name]) for name in summary["blocks"]),
            format_size(width["experts_bytes"]),
            f"{width['bits_per_weight']:.2f}",
            f"{width['lut_share']:.1%}",
            f"{width['padding_share']:.1%}",
            format_size(width["own_lut_experts_bytes"]),
        )
    return table
