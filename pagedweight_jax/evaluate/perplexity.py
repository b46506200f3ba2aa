# SPDX-License-Identifier: Apache-2.0
"""Perplexity as GPTQ and Any-Precision measure it: consecutive windows, a mean of means, the exponential.

The protocol is apart from who scores: ``score_dense`` runs unquantized weights, ``score_served`` a running engine, and
both return the log-probability of every token of a window but its first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pagedweight_jax.errors import UserError
from pagedweight_jax.models import transformer
from pagedweight_jax.models.weights import Weights

TokenProgress = Callable[[int, int], None]
"""Called with tokens scored and tokens in all."""


def silent(done: int, total: int) -> None:
    """The ``TokenProgress`` of who does not want to know."""


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """A perplexity and what it was measured on.

    Attributes:
      perplexity: exp of the mean over windows of the mean negative log-probability per window.
      windows: how many.
      window_tokens: tokens of each, all but the first of which are predicted.
      standard_error: of the mean over windows, in nats; 0 for a single window.
    """

    perplexity: float
    windows: int
    window_tokens: int
    standard_error: float


def split_windows(tokens: Sequence[int] | np.ndarray, window_tokens: int, limit: int | None = None) -> np.ndarray:
    """Returns the text as consecutive windows without overlap, int32 [windows, window_tokens]; the tail is dropped.

    Args:
      tokens: one text, tokenized once (with what its tokenizer begins a text with, if anything).
      window_tokens: tokens of a window, at least 2.
      limit: at most this many windows; None for all.

    Raises:
      UserError: not even one window, or one that predicts nothing.
    """
    if window_tokens < 2:
        raise UserError(f"perplexity: a window needs 2 tokens at least, got {window_tokens}")
    if limit is not None and limit < 1:
        raise UserError(f"perplexity: need 1 window at least, got {limit}")
    count = len(tokens) // window_tokens
    if count < 1:
        raise UserError(f"perplexity: the text has {len(tokens)} tokens, a window takes {window_tokens}")
    count = count if limit is None else min(count, limit)
    return np.asarray(tokens[: count * window_tokens], np.int32).reshape(count, window_tokens)


def perplexity(logprobs: Sequence[Sequence[float]] | np.ndarray) -> Perplexity:
    """Returns the perplexity of windows whose predicted tokens have these log-probabilities, [windows, tokens - 1].

    Raises:
      ValueError: windows of different lengths, or a log-probability that is not a finite number.
    """
    logprobs = np.asarray(logprobs, np.float64)
    if logprobs.ndim != 2 or not np.isfinite(logprobs).all():
        raise ValueError(f"log-probabilities of shape {logprobs.shape} are not all finite, or windows differ in length")
    nats_W = -logprobs.mean(axis=1)
    count = len(nats_W)
    return Perplexity(
        perplexity=float(np.exp(nats_W.mean())),
        windows=count,
        window_tokens=logprobs.shape[1] + 1,
        standard_error=float(nats_W.std(ddof=1) / count**0.5) if count > 1 else 0.0,
    )


@jax.jit
def _window_logprobs(weights: Weights, tokens_T: jax.Array) -> jax.Array:
    logp_TV = jax.nn.log_softmax(transformer.dense_forward(weights, tokens_T)[:-1], axis=-1)
    return jnp.take_along_axis(logp_TV, tokens_T[1:, None], axis=-1)[:, 0]


def score_dense(weights: Weights, windows: np.ndarray, progress: TokenProgress = silent) -> np.ndarray:
    """Returns float32 [windows, tokens - 1], the windows' log-probabilities under unquantized weights, one at a time.

    Args:
      weights: with their routed experts.
      windows: int32 [windows, tokens].
      progress: called before each window and at the end.
    """
    scored = []
    for tokens_T in windows:
        progress(len(scored) * (len(tokens_T) - 1), windows[:, 1:].size)
        scored.append(np.asarray(_window_logprobs(weights, jnp.asarray(tokens_T))))
    progress(windows[:, 1:].size, windows[:, 1:].size)
    return np.stack(scored)


class Server(Protocol):
    """What scoring needs of ``serving.engine.Engine``."""

    @property
    def has_work(self) -> bool: ...

    def add_request(self, prompt: tuple[int, ...], params: None): ...

    def step(self) -> list: ...


def score_served(engine: Server, windows: np.ndarray, progress: TokenProgress = silent) -> list[list[float]]:
    """Returns the windows' log-probabilities, [windows][tokens - 1], from scoring requests to an engine.

    All windows are queued at once, so as many run together as the engine has rows and memory: a dynamic engine scores
    them at the bits that this pressure leaves. Requests that the engine has already are served along.

    Args:
      engine: dynamic or frozen; its newest ``events`` hold what happened meanwhile.
      windows: int32 [windows, tokens].
      progress: called after each boundary.

    Raises:
      UserError: windows longer than the engine's ``max_model_len``, or tokens outside its vocabulary.
    """
    requests = [engine.add_request(tuple(tokens), None) for tokens in windows.tolist()]
    while engine.has_work:
        engine.step()
        progress(sum(len(request.logprobs) for request in requests), windows[:, 1:].size)
    return [request.logprobs for request in requests]
