# SPDX-License-Identifier: Apache-2.0
"""Calibration text in, token sequences out."""

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from pagedweight_jax.checkpoint.tokenizer import load_tokenizer
from pagedweight_jax.errors import UserError


def _open_zst(path: Path, mode: str, encoding: str) -> IO[str]:
    try:
        import zstandard  # optional: not every platform has it
    except ImportError as error:
        raise UserError(f"{path}: to read .zst, pip install zstandard") from error
    packed, text = path.read_bytes(), b""
    while packed:  # frame by frame
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            text += frame.decompress(packed)
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from error
        if not frame.eof:
            raise EOFError
        packed = frame.unused_data
    return io.StringIO(text.decode(encoding))


OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".zst": _open_zst}

BETWEEN = "\n\n"
"""What is written between two documents."""


def read_text(path: Path) -> str:
    """Returns the text of a file, or of all files of a folder in the order of their names.

    Names that end in .gz, .xz or .zst are unpacked first; .jsonl holds a document a line, in the field ``text``.

    Raises:
      UserError: a file is missing, damaged, not UTF-8, or a line of it has no text; a folder has no file.
    """
    if not path.is_dir():
        return _read_file(path)
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith(".")]
    if not files:
        raise UserError(f"{path}: a folder without files")
    return BETWEEN.join(map(_read_file, files))


def _read_file(path: Path) -> str:
    packing = path.suffix if path.suffix in OPENERS else ""
    try:
        with OPENERS.get(packing, open)(path, "rt", encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({type(error).__name__})") from error
    return BETWEEN.join(_documents(path, text)) if path.name.endswith(f".jsonl{packing}") else text


def _documents(path: Path, lines: str) -> Iterator[str]:
    for number, line in enumerate(lines.split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: line {number} is not a JSON object with a field text") from error
        if not isinstance(text, str):
            raise UserError(f"{path}: line {number}: its field text must be a string, got {type(text).__name__}")
        yield text


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
    highest = max([*begin, tokens.max(initial=0)])
    if highest >= vocab_size:
        raise UserError(f"{folder}: the tokenizer gives token {highest}, the model has {vocab_size}")
    return begin, tokens


def choose_sequences(begin: list[int], tokens: np.ndarray, samples: int, sequence_length: int, seed: int) -> np.ndarray:
    """Returns ``samples`` stretches of the text that do not overlap, at random, int32 [samples, sequence_length].

    Each starts with ``begin``, then holds consecutive tokens.

    Raises:
      UserError: the text is too short, or a size makes no sense.
    """
    stretch = sequence_length - len(begin)
    least = {"samples": (samples, 1), "tokens of each": (sequence_length, len(begin) + 1), "seed": (seed, 0)}
    for name, (value, smallest) in least.items():
        if value < smallest:
            raise UserError(f"calibration: {name}: {value} is less than {smallest}")
    available = len(tokens) // stretch
    if available < samples:
        raise UserError(
            f"calibration text too short: {len(tokens)} tokens are {available} sequences of {sequence_length}, "
            f"need {samples} (a longer --text, or fewer --samples)"
        )
    chosen = np.random.default_rng(seed).permutation(available)[:samples]
    stretches = tokens[: available * stretch].reshape(available, stretch)[chosen]
    return np.concatenate([np.tile(np.asarray(begin, np.int32), (samples, 1)), stretches], axis=1)
