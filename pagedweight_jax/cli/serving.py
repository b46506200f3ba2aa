# SPDX-License-Identifier: Apache-2.0
"""The verbs that run a paged checkpoint: generate text, measure perplexity."""

import argparse
import re
import time
from dataclasses import asdict, replace
from pathlib import Path

from pagedweight_jax.cli.common import print_json, progress_bars
from pagedweight_jax.config import ServeConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.units import format_size, parse_size
from pallas_kernels.implementation import IMPLEMENTATIONS

PRESSURE_BATCH = 16
"""Windows that a dynamic policy is scored on together."""

MOST_OF_DEVICE = 0.95
"""Share of what JAX may take of the device that a budget takes that nobody gave; the rest is a margin."""


def add_verbs(verbs) -> None:
    """Adds ``generate`` and ``evaluate`` to the sub-parsers ``verbs``."""
    verb = verbs.add_parser("generate", help="continue prompts")
    verb.set_defaults(run=generate)
    verb.add_argument(
        "--prompt", metavar="TEXT", action="append", required=True, help="what to continue; give it again for more"
    )
    verb.add_argument("--max-tokens", metavar="N", type=int, default=64, help="tokens to generate (default 64)")
    verb.add_argument("--temperature", metavar="T", type=float, default=0.0, help="0: the likeliest token (default 0)")
    verb.add_argument("--seed", metavar="N", type=int, default=0, help="of sampling (default 0)")
    _add_common(verb)

    verb = verbs.add_parser("evaluate", help="measure perplexity on a text")
    verb.set_defaults(run=evaluate)
    verb.add_argument(
        "--text",
        metavar="PATH",
        type=Path,
        required=True,
        help="a file (.jsonl: its fields text; .gz, .xz, .zst: packed) or a folder of files, tokenized as one",
    )
    verb.add_argument(
        "--mode", choices=("frozen", "dynamic"), default="frozen", help="fixed bits, or as the planner serves it"
    )
    verb.add_argument(
        "--bits", metavar="N", type=int, help="one bitwidth for all experts (frozen; default: what --memory gives)"
    )
    verb.add_argument(
        "--window",
        metavar="N",
        type=int,
        help=f"tokens of a window (default {ServeConfig.max_model_len}, or the model's context if that is shorter)",
    )
    verb.add_argument("--limit", metavar="N", type=int, help="score this many windows at most")
    verb.add_argument(
        "--batch",
        metavar="N",
        type=int,
        help=f"windows scored together (default 1 frozen, {PRESSURE_BATCH} dynamic)",
    )
    verb.add_argument("--reference", metavar="HF_DIR", type=Path, help="source folder: also measure KL divergence")
    verb.add_argument(
        "--schedule", metavar="FILE", type=Path, help="write the score and each boundary's bits and memory as JSON"
    )
    _add_common(verb)


def _add_common(verb) -> None:
    verb.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a paged checkpoint")
    verb.add_argument(
        "--memory",
        metavar="SIZE",
        type=parse_memory,
        help="budget of device memory: 10GiB, or 90%% of what JAX may take (default: the top width and all contexts, "
        "as far as the device holds them)",
    )
    verb.add_argument(
        "--implementation",
        choices=IMPLEMENTATIONS,
        help="what the steps run on (default: triton on an NVIDIA GPU, xla elsewhere)",
    )
    verb.add_argument("--json", action="store_true", help="print JSON")


def parse_memory(text: str) -> int | float:
    """Returns bytes, or 0.9 for ``90%``, a share of what JAX may take of the device.

    Raises:
      UserError: it is neither.
    """
    percent = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*%", text.strip())
    if percent is None:
        return parse_size(text)
    if not 0 < float(percent[1]) <= 100:
        raise UserError(f"memory {text!r}: a share lies above 0% and up to 100%")
    return float(percent[1]) / 100


def generate(args: argparse.Namespace) -> int:
    from pagedweight_jax.checkpoint.paged import open_checkpoint
    from pagedweight_jax.serving.llm import LLM
    from pagedweight_jax.serving.request import SamplingParams

    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    manifest = open_checkpoint(args.checkpoint).manifest
    context_tokens = manifest.config.max_position_embeddings
    longest_tokens = _longest_context(args.checkpoint, args.prompt, args.max_tokens, context_tokens)
    max_model_len = min(context_tokens, max(ServeConfig.max_model_len, longest_tokens))
    config = ServeConfig(
        memory_bytes=1,
        max_num_seqs=min(ServeConfig.max_num_seqs, len(args.prompt)),
        max_model_len=max_model_len,
        prefill_chunk_tokens=min(ServeConfig.prefill_chunk_tokens, max_model_len),
        implementation=args.implementation,
    )
    config = _with_budget(config, manifest, args.memory)
    total, made, bits = len(args.prompt) * args.max_tokens, 0, []

    def on_step(llm: LLM) -> None:
        nonlocal made
        event = llm.engine.events[-1]
        made += event.tokens
        bits.append(event.mean_bits)
        progress("generate", made, total)

    with progress_bars() as (progress, report), LLM(args.checkpoint, config, progress) as llm:
        report(_ledger_line(llm.engine))
        start = time.perf_counter()
        outputs = llm.generate(args.prompt, params, on_step)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.token_ids) for output in outputs)
        report(f"{tokens} tokens in {seconds:.1f} s; {_bits_line(bits, config.memory_bytes)}")
    if args.json:
        fields = ("text", "token_ids", "finish_reason")
        print_json([{"prompt": p, **{name: getattr(o, name) for name in fields}} for p, o in zip(args.prompt, outputs)])
    else:
        for prompt, output in zip(args.prompt, outputs):
            print(prompt + output.text)
    return 0


def evaluate(args: argparse.Namespace) -> int:
    from pagedweight_jax.calibrate.text import read_text
    from pagedweight_jax.checkpoint.paged import open_checkpoint
    from pagedweight_jax.checkpoint.tokenizer import load_tokenizer
    from pagedweight_jax.evaluate.perplexity import split_windows
    from pagedweight_jax.evaluate.pressure import score_under_pressure
    from pagedweight_jax.evaluate.schedule import check_schedule, write_schedule
    from pagedweight_jax.serving.engine import Engine

    if args.schedule:
        check_schedule(args.schedule)
    checkpoint = open_checkpoint(args.checkpoint)
    tokens = load_tokenizer(args.checkpoint)(read_text(args.text), verbose=False).input_ids
    context_tokens = checkpoint.manifest.config.max_position_embeddings
    window_tokens = args.window if args.window is not None else min(ServeConfig.max_model_len, context_tokens)
    windows = split_windows(tokens, window_tokens, args.limit)
    config = ServeConfig(
        memory_bytes=1,
        max_num_seqs=args.batch if args.batch is not None else 1 if args.mode == "frozen" else PRESSURE_BATCH,
        max_model_len=window_tokens,
        prefill_chunk_tokens=min(ServeConfig.prefill_chunk_tokens, window_tokens),
        mode=args.mode,
        bits=args.bits,
        implementation=args.implementation,
    )
    config = _with_budget(config, checkpoint.manifest, args.memory)
    with progress_bars() as (progress, _):
        reference = _reference(args.reference, checkpoint.manifest.config, windows, progress)
        engine = Engine(checkpoint, config, progress=progress)
        try:
            score = score_under_pressure(engine, windows, reference, lambda *done: progress("score", *done))
        finally:
            engine.close()
    schedule = score.schedule
    result = asdict(score.perplexity) | {
        "kl": score.kl,
        "kl_standard_error": score.kl_standard_error,
        "mode": args.mode,
        "batch": config.max_num_seqs,
        "mean_bits": schedule.mean_bits,
        "lowest_bits": schedule.lowest_bits,
        "budget_bytes": config.memory_bytes,
        "peak_device_bytes": max(boundary.device_bytes for boundary in schedule.boundaries),
    }
    try:
        if args.schedule:
            write_schedule(args.schedule, schedule, result)
    finally:  # a full disk does not cost the score, nor a reader that has gone the schedule
        if args.json:
            print_json(result)
        else:
            kl = "" if score.kl is None else f", KL {score.kl:.5f} ± {score.kl_standard_error:.5f} nats a token,"
            bits = _bits_line([boundary.mean_bits for boundary in schedule.boundaries], config.memory_bytes)
            print(
                f"perplexity {result['perplexity']:.4f}{kl} on {result['windows']} windows of "
                f"{result['window_tokens']} tokens; {bits}"
            )
    return 0


def _reference(folder: Path | None, config, windows, progress):
    """Returns the unquantized model on the windows, in float32, or None where no folder was given."""
    from pagedweight_jax.checkpoint.hf import load_config, load_weights
    from pagedweight_jax.evaluate.divergence import reference

    if folder is None:
        return None
    if load_config(folder) != config:
        raise UserError(f"{folder}: not the model that the checkpoint was made of, its configuration is another")
    weights = load_weights(folder, config, "float32", lambda line: None)
    return reference(weights, windows, lambda *done: progress("reference", *done))


def _longest_context(folder: Path, prompts: list[str], max_tokens: int, context_tokens: int) -> int:
    """Returns the tokens that the longest prompt and its answer take.

    What cannot be served is refused here, before anything takes time.
    """
    from pagedweight_jax.checkpoint.tokenizer import load_tokenizer
    from pagedweight_jax.serving.llm import encode

    tokenizer, longest_tokens = load_tokenizer(folder), 0
    for place, prompt in enumerate(prompts):
        try:
            num_tokens = len(encode(tokenizer, prompt))
        except UserError as error:
            raise UserError(f"prompt {place}: {error}") from error
        if not num_tokens:
            raise UserError(f"prompt {place}: there is no token in {prompt!r}")
        if num_tokens + max_tokens > context_tokens:
            raise UserError(
                f"prompt {place}: its {num_tokens} tokens and {max_tokens} to generate make "
                f"{num_tokens + max_tokens}, the model's context is {context_tokens} tokens"
            )
        longest_tokens = max(longest_tokens, num_tokens + max_tokens)
    return longest_tokens


def _with_budget(config: ServeConfig, manifest, memory: int | float | None) -> ServeConfig:
    """Returns ``config`` with the budget ``memory``: bytes, a share of what JAX may take, or None for all of use.

    What the machine cannot run is refused here, before anything takes time.
    """
    import jax

    from pagedweight_jax.serving.implementation import choose_implementation
    from pagedweight_jax.serving.ledger import device_memory_bytes
    from pagedweight_jax.serving.loading import budget_bytes

    device = jax.devices()[0]
    choose_implementation(config.implementation, manifest.config, device)
    limit_bytes = device_memory_bytes(device)
    if isinstance(memory, float):
        if limit_bytes is None:
            raise UserError(f"memory {100 * memory:g}%: a {device.platform} does not say how much it has; give bytes")
        memory = int(memory * limit_bytes)
    if memory is None:
        kv_tokens = config.max_num_seqs * config.max_model_len
        memory = budget_bytes(manifest, config, bits=config.bits or manifest.max_bits, kv_tokens=kv_tokens)
        memory = memory if limit_bytes is None else min(memory, int(MOST_OF_DEVICE * limit_bytes))
    return replace(config, memory_bytes=memory)


def _ledger_line(engine) -> str:
    """What the budget is made of, and what the host holds beside it."""
    rows = [*engine.ledger.rows(), ("pages on the host", engine.host_bytes)]
    entries = "; ".join(f"{what} {format_size(num_bytes)}" for what, num_bytes in rows)
    return f"budget {format_size(engine.ledger.budget_bytes)}: {entries}"


def _bits_line(bits: list[float], budget_bytes: int) -> str:
    """What the run's precision was at its boundaries, and the budget."""
    low, high = min(bits), max(bits)
    shown = f"{high:.2f}" if high - low < 0.005 else f"{high:.2f} to {low:.2f}"
    return f"mean bits {shown}, budget {format_size(budget_bytes)}"
