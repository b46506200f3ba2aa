# SPDX-License-Identifier: Apache-2.0
"""Calibration text in, token sequences out."""

from pathlib import Path

import numpy as np

from pagedweight_jax.checkpoint.tokenizer import load_tokenizer
from pagedweight_jax.errors import UserError


def read_text(path: Path) -> str:
    """Returns the text of ``path``.

    Raises:
      UserError: the file is missing, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({type(error).__name__})") from error


def tokenize(folder: Path, text: str, vocab_size: int) -> tuple[list[int], np.ndarray]:
    """Returns the tokens that this tokenizer begins every text with, and those of the text itself, int32 [tokens].

    Args:
      folder: holds the tokenizer.
      text: one text; documents are told apart only by what is written between them.
      vocab_size: of the model.

    Raises:
      UserError: no tokenizer, or one that is not the model's.
    """
    tokenizer = load_tokenizer(folder)
    begin = tokenizer("").input_ids
    if begin != [tokenizer.bos_token_id]:  # an end token, or nothing
        begin = []
    tokens = np.asarray(tokenizer(text, add_special_tokens=False, verbose=False).input_ids, np.int32)
    if tokens.size and tokens.max() >= vocab_size:
        raise UserError(f"{folder}: the tokenizer gives token {tokens.max()}, the model has {vocab_size}")
    return begin, tokens


def choose_sequences(begin: list[int], tokens: np.ndarray, samples: int, sequence_length: int, seed: int) -> np.ndarray:
    """Returns ``samples`` stretches of the text that do not overlap, at random, int32 [samples, sequence_length].

    Each starts with ``begin``, then holds consecutive tokens.

    Raises:
      UserError: the text is too short, or a size makes no sense.
    """
    stretch = sequence_length - len(begin)
    if samples < 1 or stretch < 1 or seed < 0:
        raise UserError(
            f"calibration: need at least 1 sample, {len(begin) + 1} tokens each and a seed of 0 or more, "
            f"got {samples}, {sequence_length} and {seed}"
        )
    available = len(tokens) // stretch
    if available < samples:
        raise UserError(
            f"calibration text too short: {len(tokens)} tokens are {available} sequences of {sequence_length}, "
            f"need {samples} (a longer --text, or fewer --samples)"
        )
    chosen = np.random.default_rng(seed).permutation(available)[:samples]
    stretches = tokens[: available * stretch].reshape(available, stretch)[chosen]
    return np.concatenate([np.tile(np.asarray(begin, np.int32), (samples, 1)), stretches], axis=1)
