# SPDX-License-Identifier: Apache-2.0
"""The verb that teaches a paged checkpoint's planner: what to make of routing and prompts."""

import argparse
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pagedweight_jax.cli.common import print_json, progress_bars, titled_table


def add_verbs(verbs) -> None:
    """Adds ``calibrate`` to the sub-parsers ``verbs``."""
    verb = verbs.add_parser("calibrate", help="measure what the online planner goes by, without quantizing again")
    verb.set_defaults(run=calibrate)
    made = "a folder that convert made; policy.json is written there"
    verb.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help=made)
    verb.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=(),
        help="files or folders (.jsonl: fields text; .gz, .xz, .zst: packed), tokenized as one "
        "(default: the checkpoint's)",
    )
    verb.add_argument("--samples", type=int, default=100, help="sequences (default 100)")
    verb.add_argument("--sequence-length", type=int, default=512, help="tokens of each (default 512)")
    verb.add_argument("--seed", type=int, default=0, help="of the choice of sequences (default 0)")
    verb.add_argument(
        "--search",
        metavar="JOURNAL",
        type=Path,
        help="search for a better policy; every trial is a line of this file, which an interrupted search goes on from",
    )
    verb.add_argument(
        "--pin",
        metavar="LAYER.EXPERT=BITS",
        action="append",
        default=[],
        help="never lower these experts below BITS, * for all, as in 0.*=5; may be given more than once",
    )
    verb.add_argument("--plot", type=Path, help="draw measured against predicted damage; the suffix says which kind")
    verb.add_argument("--json", action="store_true", help="print JSON")


def calibrate(args: argparse.Namespace) -> int:
    from pagedweight_jax.calibrate.residual_report import check_figure, draw_held_out
    from pagedweight_jax.calibrate.residual_run import make_policy, prepare_policy
    from pagedweight_jax.checkpoint.paged import open_checkpoint
    from pagedweight_jax.planning.pins import parse_pin

    if args.plot:
        check_figure(args.plot)
    with progress_bars() as (progress, report):
        job = prepare_policy(
            open_checkpoint(args.checkpoint),
            args.text,
            samples=args.samples,
            sequence_length=args.sequence_length,
            seed=args.seed,
            journal=args.search,
            pins=[parse_pin(text) for text in args.pin],
        )
        path, online, held_out = make_policy(job, progress=progress, report=report)
        if args.plot:
            draw_held_out(args.plot, held_out, f"{args.checkpoint.name}: {args.samples} sequences, each held out once")
    summary = summarize_policy(online)
    if args.json:
        print_json({"path": str(path), **summary})
    else:
        print_policy(summary, path)
    return 0


def summarize_policy(online) -> dict:
    """Returns what is worth reading of a policy as plain numbers, ready for JSON."""
    pins = [asdict(pin) for pin in online.pins]
    return {"run": asdict(online.run), "policy": asdict(online.policy), "pins": pins, **online.fit}


def print_policy(summary: dict, path: Path) -> None:
    """Prints the policy and how well its predictions fit."""
    console = Console(highlight=False)
    console.print(path, style="bold", markup=False, soft_wrap=True)
    run, policy = summary["run"], summary["policy"]
    console.print(
        f"{run['samples']} sequences of {run['sequence_length']} tokens, seed {run['seed']}, "
        f"text {run['text_sha256'][:12]}"
    )
    console.print(
        f"{len(policy['multipliers'])} routing buckets, multipliers {policy['multipliers'][0]:.3g} to "
        f"{policy['multipliers'][-1]:.3g}; alpha {policy['alpha']:g}"
    )
    for pin in summary["pins"]:
        layer, expert = ("all" if pin[name] is None else pin[name] for name in ("layer", "expert"))
        console.print(f"pinned: layer {layer}, expert {expert}, at least {pin['bits']} bits")
    console.print(
        f"the text counts as {policy['prior_tokens']:g} tokens, half-life {policy['half_life_tokens']:g} tokens\n"
    )
    console.print(fit_table(summary["held_out"]))
    meaning = "g: the text's mean. spread: of log(damage / g). confidence: R² beyond routing."
    console.print(f"{meaning}\n", style="dim")
    console.print(foresight_table(summary["foresight"]))
    if found := summary["search"]:
        console.print(
            f"search: {found['trials']} policies, the best costs {found['relative']:.4f} of the first one's damage, "
            f"{found['relative_on_other_text'] or 1:.4f} on the half of the sequences that it was not tuned on"
        )


def foresight_table(foresight: dict) -> Table:
    """Returns what it costs to lower blocks by what is known, a line for each kind of knowledge."""
    table = titled_table(f"Damage to what follows {foresight['tokens_before']} tokens, relative to g alone")
    table.add_column("blocks are lowered by", no_wrap=True)
    for share in foresight["shares"]:
        table.add_column(f"{share:.0%} freed", justify="right", no_wrap=True)
    table.add_column("error", justify="right", no_wrap=True)
    table.add_column("rank", justify="right", no_wrap=True)
    for name, meaning in {"g": "g alone", "routing": "and routing", "prompt": "and prompt"}.items():
        costs = (f"{cost:.3f}" for cost in foresight["cost"][name])
        error, rank = foresight["error"][name], foresight["spearman"][name]
        table.add_row(meaning, *costs, f"{error:.3f}", f"{rank:.4f}")
    return table


def fit_table(records: list[dict]) -> Table:
    """Returns one line a kind and one-bit reduction."""
    table = titled_table("R² and rank correlation of the damage of single sequences, held out")
    table.add_column("block", no_wrap=True)
    for heading in ("bits", "g alone", "and routing", "and prompt", "spread", "confidence"):
        table.add_column(heading, justify="right", no_wrap=True)
    for record in records:
        table.add_row(
            record["kind"],
            f"{record['from_bits']}→{record['to_bits']}",
            *(f"{r2:.3f} {rank:.3f}" for r2, rank in zip(record["r2"].values(), record["spearman"].values())),
            f"{record['spread']:.2f}",
            f"{record['confidence']:.2f}",
        )
    return table
