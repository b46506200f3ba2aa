# SPDX-License-Identifier: Apache-2.0
"""Train the demo model, evaluate it and write its Hugging Face folder.

    python checkpoints/train_demo.py --data CORPUS --eval EVAL --minutes 12 --out checkpoints/demo-moe

The step time is measured at the start and the schedule fitted to the minutes (or to --steps, or
--max-tokens, whichever ends first). The state lies in --state; the same command resumes it.
"""

import argparse
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo_data import WEIGHT_BY_CODE, ExerciseMaker, encode_pieces, read_documents, tokenize_corpus, window_starts
from demo_export import export_hub_folder
from demo_model import DemoConfig, Params, forward, init_params, next_token_nats, num_parameters, routing_losses
from demo_state import TrainState, load_state, save_state
from evaluate_demo import Evaluator, evaluate_all, exercise_sets
from tokenizers import Tokenizer
from train_tokenizer import sample_texts, save_tokenizer, train_tokenizer

Z_LOSS = 1e-4
BALANCE_START, BALANCE_END, BALANCE_STEPS = 1e-2, 1e-3, 1500
WARMUP_STEPS, HOLD_SHARE = 300, 0.3
WARM_STEPS, TIMED_STEPS = 30, 60
SAVE_EVERY_SECONDS = 180
DEV_SETS = ("recall_200", "recall_1500", "addition_2_2", "addition_3_3")
SEED = 7


@dataclass(frozen=True)
class Recipe:
    """Sizes of a training step and how often to look."""

    length: int = 2048
    num_text: int = 46
    num_recall: int = 10
    num_addition: int = 8
    peak_lr: float = 2.5e-3
    log_every: int = 50
    eval_every: int = 400
    eval_batch: int = 32
    eval_exercises: int = 300

    @property
    def step_tokens(self) -> int:
        return self.length * (self.num_text + self.num_recall + self.num_addition)


TINY = Recipe(256, 4, 2, 2, 1e-3, 5, 20, 4, 6)
TINY_MODEL = DemoConfig(num_hidden_layers=2, hidden_size=64, num_experts=4, num_experts_per_tok=2, head_dim=16)


def learning_rate(step: int, total_steps: int, peak: float) -> float:
    """Linear warm-up, a hold until 30 % of the steps, then linear to zero."""
    hold_end = max(WARMUP_STEPS, HOLD_SHARE * total_steps)
    return peak * min(1.0, (step + 1) / WARMUP_STEPS, max(0.0, (total_steps - step) / max(1.0, total_steps - hold_end)))


def balance_coefficient(step: int) -> float:
    """High until the experts have settled, then low enough for routing to stay uneven."""
    share = min(1.0, step / BALANCE_STEPS)
    return BALANCE_START * (BALANCE_END / BALANCE_START) ** share


def make_optimizer() -> optax.GradientTransformation:
    """Clipped AdamW up to the learning rate; norms and biases (one dimension) do not decay."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
        optax.add_decayed_weights(0.1, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
    )


def loss_fn(params: Params, ids_BT, weights_BT, balance, cfg: DemoConfig, implementation: str):
    """Weighted next-token loss plus the routers' losses; auxiliaries for the log."""
    hidden, routed = forward(params, ids_BT[:, :-1], cfg, implementation)
    nats, hit = next_token_nats(params, hidden, ids_BT[:, 1:])
    weights = weights_BT[:, 1:]
    loss = jnp.sum(nats * weights) / jnp.sum(weights)
    balance_loss, z_loss, least_load = routing_losses(routed, cfg)
    text, answer = weights == WEIGHT_BY_CODE[0], weights == WEIGHT_BY_CODE[1]
    log = {
        "loss": loss,
        "text": jnp.sum(nats * text) / jnp.sum(text),
        "answer": jnp.sum(nats * answer) / jnp.maximum(1, jnp.sum(answer)),
        "answer_hit": jnp.sum(hit & answer) / jnp.maximum(1, jnp.sum(answer)),
        "balance": balance_loss,
        "least_load": least_load,
    }
    return loss + balance * balance_loss + Z_LOSS * z_loss, log


@partial(jax.jit, static_argnames=("cfg", "length", "implementation"), donate_argnums=(0, 1))
def train_step(params, opt_state, corpus, starts, exercises, lr, balance, *, cfg, length, implementation):
    """One step on the corpus windows at `starts` and the exercises' (ids, loss codes)."""
    exercise_ids, exercise_codes = exercises
    windows = jax.vmap(lambda start: jax.lax.dynamic_slice(corpus, (start,), (length + 1,)))(starts)
    ids = jnp.concatenate([windows, exercise_ids]).astype(jnp.int32)
    exercise_weights = jnp.asarray(WEIGHT_BY_CODE)[exercise_codes]
    weights = jnp.concatenate([jnp.full(windows.shape, WEIGHT_BY_CODE[0]), exercise_weights])
    grad_fn = jax.grad(partial(loss_fn, cfg=cfg, implementation=implementation), has_aux=True)
    grads, log = grad_fn(params, ids, weights, balance)
    updates, opt_state = make_optimizer().update(grads, opt_state, params)
    params = jax.tree.map(lambda p, u: p - lr * u, params, updates)
    return params, opt_state, log | {"grad_norm": optax.global_norm(grads)}


def attention_implementation(cfg: DemoConfig, length: int) -> str:
    """'cudnn' where it runs, else 'xla'."""
    if jax.default_backend() == "cpu":
        return "xla"
    try:
        q = jnp.ones((1, length, cfg.num_attention_heads, cfg.head_dim), jnp.bfloat16)
        kv = jnp.ones((1, length, cfg.num_key_value_heads, cfg.head_dim), jnp.bfloat16)
        fn = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
        jax.block_until_ready(jax.grad(lambda x: fn(x, kv, kv).astype(jnp.float32).sum())(q))
        return "cudnn"
    except Exception as error:  # whatever the library lacks, the portable path is right
        print(f"cudnn attention is not available ({type(error).__name__}: {str(error)[:200]}); using xla")
        return "xla"


def exercise_stream(maker: ExerciseMaker, first_step: int, workers: int, ahead: int = 128) -> Iterator:
    """The steps' exercise sequences in order, made ahead by worker processes."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        queue = deque(pool.submit(maker, first_step + i) for i in range(ahead))
        step = first_step + ahead
        try:
            while True:
                made = queue.popleft().result()
                queue.append(pool.submit(maker, step))
                step += 1
                yield made
        finally:
            pool.shutdown(cancel_futures=True)


def timed_steps(state: TrainState, advance: Callable) -> tuple[TrainState, float]:
    """The state some steps on, and the seconds that one step takes."""
    for _ in range(WARM_STEPS):
        state, log = advance(state)
    jax.block_until_ready(log)
    began = time.monotonic()
    for _ in range(TIMED_STEPS):
        state, log = advance(state)
    jax.block_until_ready(log)
    return state, (time.monotonic() - began) / TIMED_STEPS


def fitted_steps(step_seconds: float, args, recipe: Recipe) -> int:
    """The schedule's steps: what --minutes allow, or --steps; at most --max-tokens."""
    steps = args.steps or max(2 * WARMUP_STEPS, int(60 * args.minutes / step_seconds))
    steps = min(steps, int(args.max_tokens / recipe.step_tokens))
    rate = recipe.step_tokens / step_seconds
    print(f"{1e3 * step_seconds:.1f} ms a step, {rate:,.0f} tokens/s; {steps} steps, "
          f"{steps * recipe.step_tokens / 1e6:,.0f} M tokens", flush=True)  # fmt: skip
    return steps


def train(args, cfg: DemoConfig, recipe: Recipe, tokenizer: Tokenizer, evaluator: Evaluator, clock) -> TrainState:
    """Train to the end of the schedule, or to --stop-after; the state is saved either way."""
    corpus, valid_ids, _ = tokenize_corpus(args.data, tokenizer, args.state)
    print(f"[{clock():.1f} s] {len(corpus):,} training tokens, {len(valid_ids):,} validation tokens", flush=True)
    state_path = args.state / "state.npz"
    params = init_params(jax.random.key(SEED), cfg)
    state = TrainState(params, make_optimizer().init(params))
    if state_path.exists():
        state = load_state(state_path, state)
        print(f"resumed at step {state.step} of {state.total_steps}", flush=True)

    corpus_on_device = jnp.asarray(corpus)
    step_fn = partial(train_step, cfg=cfg, length=recipe.length, implementation=evaluator.implementation)
    pieces, length = encode_pieces(tokenizer), recipe.length + 1
    maker = ExerciseMaker(args.state / "train.npy", pieces, length, recipe.num_recall, recipe.num_addition, SEED)
    stream = exercise_stream(maker, state.step, args.workers)
    dev_sets = exercise_sets(evaluator, tokenizer.decode(valid_ids[:60_000].tolist()), 2 * recipe.eval_batch, seed=99)

    def advance(state: TrainState) -> tuple[TrainState, dict]:
        lr = learning_rate(state.step, state.total_steps or 10**9, recipe.peak_lr)
        balance = balance_coefficient(state.step)
        starts = window_starts(state.step, recipe.num_text, recipe.length, len(corpus), SEED)
        params, opt_state, log = step_fn(
            state.params, state.opt_state, corpus_on_device, starts, next(stream), np.float32(lr), np.float32(balance)
        )
        return state.replace(params=params, opt_state=opt_state, step=state.step + 1), log | {"lr": lr}

    def report(state: TrainState, log: dict) -> dict:
        row = {"step": state.step} | {name: round(float(value), 6) for name, value in log.items()}
        if not np.isfinite(row["loss"]):
            raise FloatingPointError(f"the loss is {row['loss']} at step {state.step}")
        if state.step % recipe.eval_every == 0:
            valid = evaluator.perplexity(state.params, valid_ids, 1, max_windows=2 * recipe.eval_batch)
            row["valid"] = valid["loss_nats"]
            row |= {name: evaluator.accuracy(state.params, dev_sets[name]) for name in DEV_SETS if name in dev_sets}
            print(f"[{clock():.0f} s]", {name: f"{value:.4g}" for name, value in row.items()}, flush=True)
        return row

    began, saved_at, seconds_before = clock(), clock(), state.seconds
    if not state.total_steps:
        state, step_seconds = timed_steps(state, advance)
        state = state.replace(total_steps=fitted_steps(step_seconds, args, recipe))
    with open(args.state / "log.jsonl", "a") as log_file:
        while state.step < state.total_steps and clock() < 60 * args.stop_after:
            state, log = advance(state)
            if state.step % recipe.log_every == 0:
                log_file.write(json.dumps(report(state, log)) + "\n")
                log_file.flush()
            state = state.replace(seconds=seconds_before + clock() - began)
            if clock() - saved_at > SAVE_EVERY_SECONDS:
                save_state(state_path, state)
                saved_at = clock()
    save_state(state_path, state)
    stream.close()
    print(f"[{clock():.1f} s] at step {state.step} of {state.total_steps}", flush=True)
    return state


def finish(args, state: TrainState, cfg: DemoConfig, recipe: Recipe, evaluator: Evaluator) -> None:
    """Export the weights; write and print what the card reports."""
    safetensors_bytes = export_hub_folder(state.params, cfg, args.out)
    training = {
        "steps": state.step,
        "tokens": state.step * recipe.step_tokens,
        "train_seconds": state.seconds,
        "parameters": num_parameters(state.params),
        "safetensors_bytes": safetensors_bytes,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "recipe": asdict(recipe),
    }
    _, valid_ids, valid_bytes = tokenize_corpus(args.data, evaluator.tokenizer, args.state)
    results = evaluate_all(evaluator, state.params, valid_ids, valid_bytes, args.eval, recipe.eval_exercises)
    (args.state / "results.json").write_text(json.dumps({"training": training} | results, indent=1) + "\n")
    for name, row in results["perplexity"].items():
        print(f"{name}: loss {row['loss_nats']:.4f}, perplexity {row['perplexity']:.3f}, "
              f"{row['bits_per_byte']:.4f} bits per byte, {row['windows']} windows")  # fmt: skip
    print({name: round(value, 4) for name, value in results["exercises"].items()})
    print(*results["samples"], sep="\n---\n", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of .txt or .txt.xz files")
    parser.add_argument("--eval", type=Path, help="folder with wiki.test.raw and *.jsonl.xz held-out texts")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "demo-moe")
    parser.add_argument("--state", type=Path, default=Path(".train"), help="folder for the state and the token ids")
    parser.add_argument("--minutes", type=float, default=12.0, help="training time that the schedule is fitted to")
    parser.add_argument("--steps", type=int, help="fix the number of steps instead")
    parser.add_argument("--max-tokens", type=float, default=1e12)
    parser.add_argument("--stop-after", type=float, default=1e9, help="minutes after which to save and stop")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--tiny", action="store_true", help="a two-layer model on short sequences, to try the script")
    return parser.parse_args()


def main() -> None:
    began = time.monotonic()
    args = parse_args()
    args.state.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(args.state.resolve() / "compiled"))
    cfg, recipe = (TINY_MODEL, TINY) if args.tiny else (DemoConfig(), Recipe())
    if not (args.out / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(sample_texts(read_documents(args.data)), cfg.vocab_size), args.out)
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    implementation = attention_implementation(cfg, recipe.length)
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, attention by {implementation}", flush=True)
    evaluator = Evaluator(cfg, tokenizer, recipe.length, recipe.eval_batch, implementation)
    state = train(args, cfg, recipe, tokenizer, evaluator, lambda: time.monotonic() - began)
    if state.step == state.total_steps:
        finish(args, state, cfg, recipe, evaluator)
    else:
        print("stopped before the end of the schedule; the same command resumes it")


if __name__ == "__main__":
    main()
