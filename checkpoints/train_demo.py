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
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
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
from evaluate_demo import Evaluator, evaluate_all, exercise_sets
from tokenizers import Tokenizer
from train_tokenizer import sample_texts, save_tokenizer, train_tokenizer

Z_LOSS = 1e-4
BALANCE_START, BALANCE_END, BALANCE_STEPS = 1e-2, 1e-3, 1500
WARMUP_STEPS, HOLD_SHARE = 300, 0.3
MEASURED_FROM, MEASURED_TO = 30, 90
SEED = 7


@dataclass(frozen=True)
class Recipe:
    """Sizes of a training step."""

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


@partial(jax.jit, static_argnames=("cfg", "recipe", "implementation"), donate_argnums=(0, 1))
def train_step(params, opt_state, corpus, starts, exercise_ids, exercise_codes, lr, balance, *, cfg, recipe, implementation):
    """One step on `starts` windows of the corpus and the exercise sequences given."""
    windows = jax.vmap(lambda start: jax.lax.dynamic_slice(corpus, (start,), (recipe.length + 1,)))(starts)
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


def save_state(path: Path, params: Params, opt_state, meta: dict) -> None:
    leaves = jax.device_get(jax.tree.leaves((params, opt_state)))
    with open(path.with_suffix(".tmp"), "wb") as file:
        np.savez(file, meta=json.dumps(meta), **{f"leaf_{i}": leaf for i, leaf in enumerate(leaves)})
    os.replace(path.with_suffix(".tmp"), path)


def load_state(path: Path, params: Params, opt_state):
    tree = jax.tree.structure((params, opt_state))
    with np.load(path) as file:
        leaves = [jnp.asarray(file[f"leaf_{i}"]) for i in range(tree.num_leaves)]
        return *jax.tree.unflatten(tree, leaves), json.loads(str(file["meta"]))


def train(args, cfg: DemoConfig, recipe: Recipe, tokenizer: Tokenizer, evaluator: Evaluator, clock) -> tuple[Params, dict] | None:
    """Train to the end of the schedule, or save and return None when --stop-after is near."""
    corpus, valid_ids, _ = tokenize_corpus(args.data, tokenizer, args.state)
    print(f"[{clock():.1f} s] {len(corpus):,} training tokens, {len(valid_ids):,} validation tokens", flush=True)
    state_path, log_path = args.state / "state.npz", args.state / "log.jsonl"
    params = init_params(jax.random.key(SEED), cfg)
    opt_state = make_optimizer().init(params)
    meta = {"step": 0, "total_steps": 0, "train_seconds": 0.0, "parameters": num_parameters(params)}
    if state_path.exists():
        params, opt_state, meta = load_state(state_path, params, opt_state)
        print(f"resumed at step {meta['step']} of {meta['total_steps']}", flush=True)
    length_one = recipe.length + 1
    maker = ExerciseMaker(
        args.state / "train.npy", encode_pieces(tokenizer), length_one, recipe.num_recall, recipe.num_addition, SEED
    )
    stream = exercise_stream(maker, meta["step"], args.workers)
    dev_sets = exercise_sets(evaluator, tokenizer.decode(valid_ids[:60_000].tolist()), 2 * recipe.eval_batch, seed=99)
    dev_sets = {n: s for n, s in dev_sets.items() if n in ("recall_200", "recall_1500", "addition_2_2", "addition_3_3")}
    corpus_device = jnp.asarray(corpus)
    step_fn = partial(train_step, cfg=cfg, recipe=recipe, implementation=evaluator.implementation)
    step, total, began, saved_at, window_began = meta["step"], meta["total_steps"], clock(), clock(), None
    first_step, since, since_step, log_file = step, clock(), step, open(log_path, "a")  # noqa: SIM115
    before = meta["train_seconds"]

    def meta_now():
        return meta | {"step": step, "total_steps": total, "train_seconds": before + clock() - began,
                       "tokens": step * recipe.step_tokens}

    while not total or step < total:
        exercise_ids, exercise_codes = next(stream)
        starts = window_starts(step, recipe.num_text, recipe.length, len(corpus), SEED)
        lr = learning_rate(step, total or 10**9, recipe.peak_lr)
        params, opt_state, log = step_fn(
            params, opt_state, corpus_device, starts, exercise_ids, exercise_codes,
            np.float32(lr), np.float32(balance_coefficient(step)),
        )
        step += 1
        if step == first_step + 1:
            jax.block_until_ready(log)
            print(f"[{clock():.1f} s] first step done", flush=True)
        if not total and step in (MEASURED_FROM, MEASURED_TO):
            jax.block_until_ready(log)
            if step == MEASURED_TO:
                seconds = (clock() - window_began) / (MEASURED_TO - MEASURED_FROM)
                total = max(2 * WARMUP_STEPS, int(60 * args.minutes / seconds), args.steps or 0)
                total = min(total, args.steps or total, int(args.max_tokens / recipe.step_tokens))
                print(f"{1e3 * seconds:.1f} ms a step, {recipe.step_tokens / seconds:,.0f} tokens/s; "
                      f"{total} steps, {total * recipe.step_tokens / 1e6:,.0f} M tokens", flush=True)
            window_began = clock()
        if step % recipe.log_every == 0:
            row = {k: round(float(v), 4) for k, v in log.items()} | {"step": step, "lr": lr}
            if not np.isfinite(row["loss"]):
                raise FloatingPointError(f"the loss is {row['loss']} at step {step}")
            rate = (step - since_step) * recipe.step_tokens / (clock() - since)
            since, since_step = clock(), step
            if step % recipe.eval_every == 0:
                row["valid"] = evaluator.perplexity(params, valid_ids, 1, 2 * recipe.eval_batch)["loss_nats"]
                row |= {name: evaluator.accuracy(params, exercises) for name, exercises in dev_sets.items()}
                since = clock()
            log_file.write(json.dumps(row) + "\n")
            log_file.flush()
            if step % (4 * recipe.log_every) == 0:
                print(f"[{clock():.0f} s] {rate:,.0f} tok/s", {k: f"{v:.4g}" for k, v in row.items()}, flush=True)
        if clock() - saved_at > 180:
            save_state(state_path, params, opt_state, meta_now())
            saved_at = clock()
        if clock() > 60 * args.stop_after and step < total:
            save_state(state_path, params, opt_state, meta_now())
            print(f"[{clock():.1f} s] stopped at step {step} of {total}; the same command resumes", flush=True)
            stream.close()
            return None
    save_state(state_path, params, opt_state, meta_now())
    stream.close()
    return params, meta_now()


def main() -> None:
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
    args = parser.parse_args()

    began = time.monotonic()
    args.state.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(args.state.resolve() / "compiled"))
    cfg, recipe = (TINY_MODEL, TINY) if args.tiny else (DemoConfig(), Recipe())
    if not (args.out / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(sample_texts(read_documents(args.data)), cfg.vocab_size), args.out)
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    implementation = attention_implementation(cfg, recipe.length)
    evaluator = Evaluator(cfg, tokenizer, recipe.length, recipe.eval_batch, implementation)
    device = jax.devices()[0]
    print(f"{device.device_kind}, JAX {jax.__version__}, attention by {implementation}", flush=True)

    def clock() -> float:
        return time.monotonic() - began

    trained = train(args, cfg, recipe, tokenizer, evaluator, clock)
    if trained is None:
        return
    params, meta = trained
    print(f"[{clock():.1f} s] trained: {meta}", flush=True)
    meta |= {"safetensors_bytes": export_hub_folder(params, cfg, args.out), "device": device.device_kind,
             "jax": jax.__version__, "recipe": {f: getattr(recipe, f) for f in recipe.__dataclass_fields__}}
    _, valid_ids, valid_bytes = tokenize_corpus(args.data, tokenizer, args.state)
    results = evaluate_all(evaluator, params, valid_ids, valid_bytes, args.eval, recipe.eval_exercises)
    (args.state / "results.json").write_text(json.dumps({"training": meta} | results, indent=1) + "\n")
    for name, row in results["perplexity"].items():
        print(f"{name}: loss {row['loss_nats']:.4f}, perplexity {row['perplexity']:.3f}, "
              f"{row['bits_per_byte']:.4f} bits per byte, {row['windows']} windows")
    print({k: round(v, 4) for k, v in results["exercises"].items()})
    print(*results["samples"], sep="\n---\n")
    print(f"[{clock():.1f} s] done", flush=True)


if __name__ == "__main__":
    main()
