# SPDX-License-Identifier: Apache-2.0
"""Corpus to token ids, and training sequences that weave the exercises into running text."""

import lzma
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from exercises import KEYS, MAX_CODE, MIN_CODE, is_heldout_sum, recall_stem
from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
END_ID = 0
VALIDATION_EVERY = 100
# Loss weights by code: running text; what an exercise asks for; scaffolding and random digits, which none can foresee.
TEXT, ANSWER, SCAFFOLD = 0, 1, 2
WEIGHT_BY_CODE = np.array([1.0, 3.0, 0.1], np.float32)


def read_text(path: Path) -> str:
    """The text of a plain or xz-packed file."""
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        return file.read()


def read_documents(folder: Path) -> list[str]:
    """Every document of the folder's .txt and .txt.xz files; a line `<|endoftext|>` ends each."""
    paths = sorted([*folder.glob("*.txt"), *folder.glob("*.txt.xz")])
    if not paths:
        raise FileNotFoundError(f"no .txt or .txt.xz file in {folder}")
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(read_text, paths))
    return [part.strip() for text in texts for part in text.split(END_OF_TEXT) if part.strip()]


def tokenize_corpus(folder: Path, tokenizer: Tokenizer, cache: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Training ids, validation ids (every 100th document) and the validation text's bytes.

    Kept in `cache`, so a resumed run skips the work. Each document ends with id 0.
    """
    train_path, valid_path, bytes_path = (cache / name for name in ("train.npy", "valid.npy", "valid_bytes.npy"))
    if not bytes_path.exists():
        documents = read_documents(folder)
        held = documents[::VALIDATION_EVERY]
        kept = [d for i, d in enumerate(documents) if i % VALIDATION_EVERY]
        cache.mkdir(parents=True, exist_ok=True)
        np.save(train_path, _encode_all(kept, tokenizer))
        np.save(valid_path, _encode_all(held, tokenizer))
        np.save(bytes_path, sum(len(d.encode()) for d in held))
    return np.load(train_path, mmap_mode="r"), np.load(valid_path), int(np.load(bytes_path))


def _encode_all(documents: list[str], tokenizer: Tokenizer) -> np.ndarray:
    ids = []
    for start in range(0, len(documents), 256):
        for encoding in tokenizer.encode_batch(documents[start : start + 256], add_special_tokens=False):
            ids.append(np.array([*encoding.ids, END_ID], np.uint16))
    return np.concatenate(ids)


@dataclass(frozen=True)
class Pieces:
    """Token ids of the parts that exercise lines are made of, and which ids begin a word."""

    stems: tuple[np.ndarray, ...]
    digits: np.ndarray
    space: np.ndarray
    stop: np.ndarray
    line_feed: np.ndarray
    plus: np.ndarray
    equals: np.ndarray
    begins_word: np.ndarray


def encode_pieces(tokenizer: Tokenizer) -> Pieces:
    """The parts of exercise lines under this tokenizer; joined, they are the encoding of the whole line."""

    def ids(text: str) -> np.ndarray:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint16)

    vocab = tokenizer.get_vocab()
    begins_word = np.zeros(tokenizer.get_vocab_size(), bool)
    for token, index in vocab.items():
        begins_word[index] = token.startswith("Ġ") and len(token) > 1
    return Pieces(
        stems=tuple(ids(recall_stem(key)) for key in KEYS),
        digits=np.concatenate([ids(str(d)) for d in range(10)]),
        space=ids(" "),
        stop=ids("."),
        line_feed=ids("\n"),
        plus=ids("+"),
        equals=ids("="),
        begins_word=begins_word,
    )


class SequenceWriter:
    """Appends ids with their loss codes until a sequence of fixed length is full."""

    def __init__(self, length: int):
        self.ids = np.zeros(length, np.uint16)
        self.codes = np.full(length, SCAFFOLD, np.uint8)
        self.used = 0

    def add(self, ids: np.ndarray, code: int) -> None:
        end = min(len(self.ids), self.used + len(ids))
        self.ids[self.used : end] = ids[: end - self.used]
        self.codes[self.used : end] = code
        self.used = end

    @property
    def full(self) -> bool:
        return self.used == len(self.ids)


class FillerStream:
    """Running text from one place of the corpus, handed out in pieces that end before a word."""

    def __init__(self, rng: np.random.Generator, corpus: np.ndarray, length: int, begins_word: np.ndarray):
        while True:
            start = int(rng.integers(0, len(corpus) - 2 * length))
            self.ids = np.asarray(corpus[start : start + 2 * length])
            if not (self.ids == END_ID).any() or rng.random() < 0.02:
                break
        self.ends = np.flatnonzero(begins_word[self.ids])
        self.position = int(self.ends[0]) if len(self.ends) else 0

    def take(self, num_tokens: int) -> np.ndarray:
        wish = np.searchsorted(self.ends, self.position + num_tokens)
        end = int(self.ends[wish]) if wish < len(self.ends) else len(self.ids)
        piece = self.ids[self.position : end]
        self.position = end
        return piece


def recall_sequence(rng: np.random.Generator, corpus: np.ndarray, pieces: Pieces, length: int):
    """Ids and loss codes of a text with many codes stated and each asked for several times.

    Distances are drawn half log-uniformly and half uniformly from 12 to 80 % of the length, so the
    copying circuit forms on near pairs and is trained on far ones from the first step.
    """
    longest = int(0.8 * length)
    num_pairs = int(rng.integers(3, max(5, length // 80)))
    keys = rng.choice(len(KEYS), size=num_pairs, replace=False)
    codes = rng.integers(MIN_CODE, MAX_CODE + 1, size=num_pairs)
    stated = np.where(rng.random(num_pairs) < 0.4, rng.random(num_pairs) * 0.15, rng.random(num_pairs) * 0.9) * length
    events = [(at, pair, False) for pair, at in enumerate(stated)]
    for pair, at in enumerate(stated):
        for _ in range(int(rng.integers(1, 5))):
            near = np.exp(rng.uniform(np.log(12), np.log(longest)))
            distance = near if rng.random() < 0.5 else rng.uniform(12, longest)
            events.append((at + distance, pair, True))
    events.sort()

    filler = FillerStream(rng, corpus, length, pieces.begins_word)
    out = SequenceWriter(length)
    for at, pair, asked in events:
        gap = int(at) - out.used
        if gap > 8:
            out.add(filler.take(gap), TEXT)
            out.add(pieces.line_feed, SCAFFOLD)
        out.add(pieces.stems[keys[pair]], SCAFFOLD)
        out.add(pieces.space, SCAFFOLD)
        out.add(pieces.digits[[int(c) for c in str(codes[pair])]], ANSWER if asked else SCAFFOLD)
        out.add(pieces.stop, ANSWER if asked else SCAFFOLD)
        out.add(pieces.line_feed, SCAFFOLD)
        if out.full:
            break
    if not out.full:
        out.add(filler.take(length - out.used), TEXT)
    return out.ids, out.codes


def addition_sequence(rng: np.random.Generator, corpus: np.ndarray, pieces: Pieces, length: int):
    """Ids and loss codes of blocks of sums with running text between; no held-out sum occurs."""
    filler = FillerStream(rng, corpus, length, pieces.begins_word)
    out = SequenceWriter(length)
    if rng.random() < 0.5:
        out.add(filler.take(int(rng.integers(4, 100))), TEXT)
        out.add(pieces.line_feed, SCAFFOLD)
    while not out.full:
        for a, b in _training_sums(rng, int(rng.integers(1, 60))):
            out.add(pieces.digits[[int(c) for c in str(a)]], SCAFFOLD)
            out.add(pieces.plus, SCAFFOLD)
            out.add(pieces.digits[[int(c) for c in str(b)]], SCAFFOLD)
            out.add(pieces.equals, SCAFFOLD)
            out.add(pieces.digits[[int(c) for c in str(a + b)]], ANSWER)
            out.add(pieces.line_feed, ANSWER)
        out.add(filler.take(int(rng.integers(4, 60))), TEXT)
        out.add(pieces.line_feed, SCAFFOLD)
    return out.ids, out.codes


def _training_sums(rng: np.random.Generator, num: int) -> list[tuple[int, int]]:
    three = rng.random((2 * num + 4, 2)) < 0.75
    ab = np.where(three, rng.integers(100, 1000, three.shape), rng.integers(10, 100, three.shape))
    ab = ab[~is_heldout_sum(ab[:, 0], ab[:, 1])]
    return [(int(a), int(b)) for a, b in ab[:num]]


@dataclass(frozen=True)
class ExerciseMaker:
    """Makes the exercise sequences of a step; picklable, so worker processes can run it."""

    corpus_path: Path
    pieces: Pieces
    length: int
    num_recall: int
    num_addition: int
    seed: int

    def __call__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids [num_recall + num_addition, length] and loss codes of the same shape; a function of `step` alone."""
        rng = np.random.default_rng([self.seed, step])
        corpus = np.load(self.corpus_path, mmap_mode="r")
        made = [recall_sequence(rng, corpus, self.pieces, self.length) for _ in range(self.num_recall)]
        made += [addition_sequence(rng, corpus, self.pieces, self.length) for _ in range(self.num_addition)]
        ids, codes = zip(*made, strict=True)
        return np.stack(ids), np.stack(codes)


def window_starts(step: int, num: int, length: int, corpus_tokens: int, seed: int) -> np.ndarray:
    """Starts [num] of the step's text windows: each epoch visits every window once, in a new order and phase."""
    per_epoch = (corpus_tokens - length) // length - 1
    if per_epoch < 1:
        raise ValueError(f"the corpus has {corpus_tokens} tokens, too few for windows of {length}")
    places = np.arange(step * num, (step + 1) * num)
    starts = np.empty(num, np.int32)
    for epoch in np.unique(places // per_epoch):
        rng = np.random.default_rng([seed, 1, int(epoch)])
        phase, order = int(rng.integers(0, length)), rng.permutation(per_epoch)
        mine = places // per_epoch == epoch
        starts[mine] = phase + order[places[mine] % per_epoch] * length
    return starts
