# SPDX-License-Identifier: Apache-2.0
"""Offline generation: prompts in, texts out, with as many requests in flight as the engine has rows."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from pagedweight_jax.checkpoint.paged import Progress, no_progress, open_checkpoint
from pagedweight_jax.checkpoint.tokenizer import load_tokenizer
from pagedweight_jax.config import ServeConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.serving.engine import Engine
from pagedweight_jax.serving.interrupts import interrupts_held
from pagedweight_jax.serving.request import Request, RequestOutput, SamplingParams

Prompt = str | Sequence[int]


def encode(tokenizer, text: str) -> list[int]:
    """Returns the token ids of ``text``, with what the tokenizer adds to a whole one.

    Raises:
      UserError: it holds surrogates, such as Python makes of bytes on the command line that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"a prompt must be text: character {error.start} is {text[error.start]!a}") from error
    return tokenizer.encode(text)


class LLM:
    """A paged checkpoint, ready to generate.

    Example:
      >>> llm = LLM("demo.paged", ServeConfig(memory_bytes=40 << 20))
      >>> llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))[0].text

    Args:
      path: a paged checkpoint (``pagedweight convert``).
      config: budget, rows, context, planner.
      progress: called with the stages "compile" and "load".

    Raises:
      UserError: no checkpoint there, a damaged one, or a budget that is too small.
    """

    def __init__(
        self,
        path: str | Path,
        config: ServeConfig,
        progress: Progress = no_progress,
    ):
        self.path = Path(path)
        self.engine = Engine(open_checkpoint(self.path), config, progress=progress)
        self._tokenizer = None

    @property
    def tokenizer(self):
        """The checkpoint's tokenizer, loaded when it is first needed."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.path)
        return self._tokenizer

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        on_step: Callable[["LLM"], None] = lambda llm: None,
    ) -> list[RequestOutput]:
        """Returns one output per prompt, in their order. All prompts are checked before the first one runs.

        Ctrl-C ends it between two steps; what was asked for is cancelled, and the engine serves on. A second Ctrl-C
        ends it at once: a step that is cut short leaves an engine that can only be closed.

        Args:
          prompts: texts, or token ids.
          params: for all prompts, or one for each.
          on_step: called after every boundary, for progress displays; ``llm.engine.events[-1]`` is its record.

        Raises:
          UserError: a prompt that cannot be served, with its place in ``prompts``.
        """
        if isinstance(prompts, str):
            raise UserError(f"prompts must be a list, got one text of {len(prompts)} characters")
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise UserError(f"params must be SamplingParams, or a list of them, got {params!r}")
        if len(params) != len(prompts):
            raise UserError(f"got {len(prompts)} prompts and {len(params)} sampling parameters")
        requests: list[Request] = []
        with interrupts_held() as let_interrupts_through:
            try:
                for place, (prompt, one) in enumerate(zip(prompts, params)):
                    requests.append(self._add_request(place, prompt, one))
                    let_interrupts_through()
                while self.engine.has_work:
                    self.engine.step()
                    on_step(self)
                    let_interrupts_through()
            except BaseException:  # nothing is left behind, and the caller hears of what ended it, not of what followed
                for request in requests:
                    with suppress(Exception):  # the step may have given the engine's state away
                        self.engine.cancel(request)
                raise
        text_of = self.tokenizer.decode if any(isinstance(prompt, str) for prompt in prompts) else None
        return [self._output(request, text_of) for request in requests]

    def _add_request(self, place: int, prompt: Prompt, params: SamplingParams) -> Request:
        tokenizer = self.tokenizer if isinstance(prompt, str) else None
        try:
            return self.engine.add_request(prompt if tokenizer is None else encode(tokenizer, prompt), params)
        except UserError as error:
            raise UserError(f"prompt {place}: {error}") from error

    def close(self) -> None:
        """Ends the engine's thread."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    @staticmethod
    def _output(request: Request, text_of) -> RequestOutput:
        tokens = tuple(request.generated)
        reason = request.finish_reason
        return RequestOutput(
            prompt_token_ids=request.prompt,
            token_ids=tokens,
            text=text_of(list(tokens[:-1] if reason == "stop" else tokens)) if text_of else None,
            finish_reason=reason,
        )
