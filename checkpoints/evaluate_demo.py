# SPDX-License-Identifier: Apache-2.0
"""What the card reports about the float weights: perplexity, exercises, routing and sample text."""

import json
import lzma
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from demo_model import DemoConfig, Params, forward, next_token_nats
from exercises import Exercise, addition_set, recall_set
from tokenizers import Tokenizer

PAD_ID = 1
RECALL_DISTANCES = (100, 200, 400, 800, 1200, 1500)
RECALL_PAIRS = 8
SAMPLE_PROMPTS = ("The old man", "It was a dark night and", "The government of the United States", "She said that")


@dataclass(frozen=True)
class Evaluator:
    """The model's functions for evaluation at one batch shape."""

    cfg: DemoConfig
    tokenizer: Tokenizer
    length: int
    batch: int
    implementation: str
    dtype: jnp.dtype = jnp.bfloat16

    @partial(jax.jit, static_argnums=0)
    def _score(self, params, ids_BT):
        hidden, routed = forward(params, ids_BT, self.cfg, self.implementation, self.dtype)
        nats, hit = next_token_nats(params, hidden, jnp.roll(ids_BT, -1, axis=1))
        mass = jnp.stack([weights.sum(0) for weights, _, _ in routed])
        load = jnp.stack([(weights > 0).sum(0) for weights, _, _ in routed])
        return nats[:, :-1], hit[:, :-1], mass, load

    @partial(jax.jit, static_argnums=0)
    def _next(self, params, ids_T, position):
        hidden, _ = forward(params, ids_T[None], self.cfg, self.implementation, self.dtype)
        return jnp.argmax(hidden[0, position].astype(jnp.float32) @ params["embed"].T)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def score_rows(self, params: Params, rows: np.ndarray):
        """Nats and hits [N, length - 1] of rows [N, length], and the routers' mass and load [L, E]."""
        nats, hits, mass, load = [], [], 0.0, 0.0
        for start in range(0, len(rows), self.batch):
            part = rows[start : start + self.batch].astype(np.int32)
            padded = np.pad(part, ((0, self.batch - len(part)), (0, 0)), constant_values=PAD_ID)
            n, h, m, f = jax.device_get(self._score(params, padded))
            nats.append(n[: len(part)])
            hits.append(h[: len(part)])
            if len(part) == self.batch:
                mass, load = mass + m, load + f
        return np.concatenate(nats), np.concatenate(hits), mass, load

    def perplexity(self, params: Params, ids: np.ndarray, num_bytes: int, max_windows: int | None = None) -> dict:
        """Consecutive windows without overlap, tail dropped, length - 1 predictions each; mean of means."""
        windows = len(ids) // self.length
        rows = np.asarray(ids[: windows * self.length]).reshape(windows, self.length)[:max_windows]
        nats, _, mass, load = self.score_rows(params, rows)
        loss = float(nats.mean(axis=1).mean())
        return {
            "tokens": len(ids),
            "bytes": num_bytes,
            "windows": len(rows),
            "loss_nats": loss,
            "perplexity": float(np.exp(loss)),
            "bits_per_byte": loss / np.log(2) * len(ids) / num_bytes,
            "routing_mass": np.asarray(mass / np.maximum(1e-9, np.sum(mass, -1, keepdims=True))).tolist(),
            "routing_load": np.asarray(load / np.maximum(1e-9, np.sum(load, -1, keepdims=True))).tolist(),
        }

    def accuracy(self, params: Params, exercises: list[Exercise]) -> float:
        """Share of exercises whose every answer token is the likeliest, which is greedy decoding's exact match."""
        rows = np.full((len(exercises), self.length), PAD_ID, np.int32)
        spans = []
        for row, exercise in zip(rows, exercises, strict=True):
            prompt, answer = self.encode(exercise.prompt), self.encode(exercise.answer)
            ids = prompt + answer
            if len(ids) > self.length:
                raise ValueError(f"an exercise of {len(ids)} tokens does not fit in {self.length}")
            row[: len(ids)] = ids
            spans.append((len(prompt) - 1, len(ids) - 1))
        _, hits, _, _ = self.score_rows(params, rows)
        return float(np.mean([hit[a:b].all() for hit, (a, b) in zip(hits, spans, strict=True)]))

    def generate(self, params: Params, prompt: str, new_tokens: int = 80) -> str:
        """The prompt and its greedy continuation."""
        ids = self.encode(prompt)
        row = np.full(len(ids) + new_tokens, PAD_ID, np.int32)
        row = np.pad(row, (0, -len(row) % 128), constant_values=PAD_ID)
        row[: len(ids)] = ids
        for position in range(len(ids), len(ids) + new_tokens):
            row[position] = int(self._next(params, row, position - 1))
            if row[position] == 0:
                break
        return self.tokenizer.decode(row[: position + 1].tolist())


def wikitext_lines_joined(raw: str) -> str:
    """WikiText-2 as the papers join it: a blank line between rows, white rows empty."""
    return "\n\n".join(line if line.strip() else "" for line in raw.splitlines(keepends=True))


def read_eval_texts(folder: Path) -> dict[str, str]:
    """The evaluation texts found in the folder, by name."""
    texts = {}
    if (folder / "wiki.test.raw").exists():
        texts["wikitext2_test"] = wikitext_lines_joined((folder / "wiki.test.raw").read_text(encoding="utf-8"))
    for name in ("mixed", "long_books"):
        path = folder / f"{name}.jsonl.xz"
        if path.exists():
            with lzma.open(path, "rt", encoding="utf-8") as file:
                texts[f"heldout_{name}"] = "\n\n".join(json.loads(line)["text"] for line in file)
    return texts


def exercise_sets(evaluator: Evaluator, filler: str, num: int, seed: int = 1234) -> dict[str, list[Exercise]]:
    """Every exercise set of the card, by name; distances that do not fit in the context are left out."""
    encode = lru_cache(maxsize=None)(evaluator.encode)
    sets = {
        f"recall_{distance}": recall_set(seed, num, distance, RECALL_PAIRS, filler, encode)
        for distance in RECALL_DISTANCES
        if distance + 150 <= evaluator.length
    }
    sets["recall_50"] = recall_set(seed, num, 50, 4, filler, encode)  # there is room for few codes only
    for a, b in ((2, 2), (2, 3), (3, 2), (3, 3)):
        sets[f"addition_{a}_{b}"] = addition_set(seed, num, a, b)
    return sets


def evaluate_all(
    evaluator: Evaluator, params: Params, valid_ids, valid_bytes: int, eval_folder: Path | None, num_exercises: int
) -> dict:
    """Everything the card needs about the float weights, as JSON values."""
    results = {"perplexity": {"validation": evaluator.perplexity(params, valid_ids, valid_bytes)}}
    filler = evaluator.tokenizer.decode(np.asarray(valid_ids[:60_000]).tolist())
    for name, text in (read_eval_texts(eval_folder) if eval_folder else {}).items():
        ids = np.array(evaluator.encode(text), np.int32)
        results["perplexity"][name] = evaluator.perplexity(params, ids, len(text.encode()))
    sets = exercise_sets(evaluator, filler, num_exercises)
    results["exercises"] = {name: evaluator.accuracy(params, exercises) for name, exercises in sets.items()}
    results["distances"] = {
        name: float(np.mean([e.distance_tokens for e in exercises])) for name, exercises in sets.items()
    }
    results["samples"] = [evaluator.generate(params, prompt) for prompt in SAMPLE_PROMPTS]
    return results
