# SPDX-License-Identifier: Apache-2.0
"""A request: what was asked, and how far it has come."""

import math
import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Literal

import numpy as np

from pagedweight_jax.errors import UserError
from pagedweight_jax.planning.signals import RequestSignals
from pagedweight_jax.serving.state import MAX_STOP_IDS


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are drawn and when it ends.

    Attributes:
      temperature: 0 for greedy.
      max_tokens: the most tokens that are generated.
      seed: of this request's own random stream.
      stop_token_ids: tokens that end the request, besides the model's end-of-text tokens.
      ignore_eos: True to go on past the model's end-of-text tokens.
    """

    temperature: float = 0.0
    max_tokens: int = 128
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        if not isinstance(self.max_tokens, Integral) or self.max_tokens < 1:
            raise UserError(f"max_tokens must be a whole number, at least 1, got {self.max_tokens!r}")
        if not isinstance(self.temperature, Real) or not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature must be 0 (greedy) or a positive number, got {self.temperature!r}")
        if not isinstance(self.seed, Integral) or not 0 <= self.seed < 2**32:
            raise UserError(f"seed must be a whole number in 0..2^32-1, got {self.seed!r}")
        if not isinstance(self.stop_token_ids, Collection):
            raise UserError(f"stop_token_ids must be a list of tokens, got {self.stop_token_ids!r}")
        for token in self.stop_token_ids:
            if not isinstance(token, Integral) or not 0 <= token < 2**31:
                raise UserError(f"stop tokens must be whole numbers in 0..2^31-1, got {token!r}")

    def stop_ids(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Returns every token that ends the request.

        Raises:
          UserError: more than the device's table holds.
        """
        stops = tuple(dict.fromkeys((*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids))))
        if len(stops) > MAX_STOP_IDS:
            raise UserError(f"a request may have at most {MAX_STOP_IDS} stop tokens, got {len(stops)}")
        return stops


def token_ids(prompt: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Returns a prompt's token ids as integers.

    Raises:
      UserError: they are not integers (text, floats, a single number), or one is outside the vocabulary.
    """
    try:
        tokens = tuple(map(operator.index, prompt))
    except TypeError as error:
        raise UserError(f"a prompt must be a list of token ids ({error})") from error
    for place, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise UserError(f"prompt token {place} is {token}, the vocabulary is 0..{vocab_size - 1}")
    return tokens


FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A finished request.

    Attributes:
      prompt_token_ids: the prompt.
      token_ids: the generated tokens; a stop token is the last of them.
      text: the generated text without the stop token, or None where there is no tokenizer.
      finish_reason: "stop", "length" or "cancelled".
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason


@dataclass(eq=False)
class Request:
    """The scheduler's own record of a request; it changes as the request runs.

    A scoring request has no ``params``: its tokens are teacher-forced in chunks, and their log-probabilities collected.

    Attributes:
      number: order of arrival.
      prompt: token ids.
      params: sampling, or None to score the prompt.
      stops: tokens that end it.
      row: the decode row that it holds, None while it waits.
      prefilled_tokens: leading tokens of ``tokens`` that the device was given in chunks.
      decoding: True once its last chunk was given to the device.
      generated: tokens seen by the host.
      logprobs: of a scoring request, one of each prompt token but the first.
      hidden: of a scoring request that asked for them, the last hidden states of its prompt, [T, D] a chunk; else None.
      signals: what its tokens showed of the experts, as far as the host has seen; None before that and once it ended.
      num_preemptions: times it lost its row and began again.
      cancelled: True once nobody wants it any more.
    """

    number: int
    prompt: tuple[int, ...]
    params: SamplingParams | None
    stops: tuple[int, ...] = ()
    row: int | None = None
    prefilled_tokens: int = 0
    decoding: bool = False
    generated: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    hidden: list[np.ndarray] | None = None
    signals: RequestSignals | None = None
    num_preemptions: int = 0
    cancelled: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens known to the host."""
        return self.prompt + tuple(self.generated)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def max_context_tokens(self) -> int:
        return len(self.prompt) + (self.params.max_tokens if self.params else 0)

    @property
    def remaining_tokens(self) -> int:
        """Tokens that it may still generate."""
        return self.params.max_tokens - len(self.generated) if self.params else 0

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, or None while it runs."""
        if self.cancelled:
            return "cancelled"
        if self.generated and self.generated[-1] in self.stops:
            return "stop"
        done = self.remaining_tokens <= 0 and len(self.logprobs) == (0 if self.params else len(self.prompt) - 1)
        return "length" if done else None

    def begin_again(self) -> None:
        """Forgets all that was computed but the tokens: it lost its row."""
        self.prefilled_tokens = 0
        self.decoding = False
        self.logprobs.clear()
        self.hidden = None if self.hidden is None else []
        self.signals = None
        self.num_preemptions += 1
