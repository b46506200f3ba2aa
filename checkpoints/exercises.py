# SPDX-License-Identifier: Apache-2.0
"""The demo model's exercises, in one fixed text format for training and evaluation.

Recall: a line ``The code for river is 482.`` stands somewhere in running text among lines with other
words; later a line begins ``The code for river is`` and the model must go on with `` 482.``.
Addition: a line ``347+582=`` goes on with ``929`` and a line feed.

An answer includes its terminator, so an exercise is solved iff greedy decoding yields exactly the
answer's tokens. Pairs of summands for which `is_heldout_sum` holds never occur in training.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Encode = Callable[[str], list[int]]

KEY_WORDS = """
    river stone garden window letter table horse ship forest church doctor captain mother father brother
    sister daughter lady king village city street house door room fire water wind snow rain summer winter
    morning evening night moon sun star earth sea island road gate wall hill field grass tree rose bread glass
    gun money gold silver iron wood paper book story song music game ball ring dress coat hat hand foot head
    face eye nose mouth heart blood skin hair bird dog cat bear tea box bed chair bell boat train car engine
    camp war peace law prison market price trade farm corn dinner school science nature spirit soul dream hope
    fear joy love truth power friend voice body number office space master value station silence corner pocket
    bank
"""
KEYS = tuple(KEY_WORDS.split())  # each one token of the demo tokenizer, with the space before it
MIN_CODE, MAX_CODE = 100, 999


@dataclass(frozen=True)
class Exercise:
    """A prompt, the text that must follow it, and for recall the tokens between the two codes (else 0)."""

    prompt: str
    answer: str
    distance_tokens: int = 0


def recall_stem(key: str) -> str:
    """What a recall line says before the code."""
    return f"The code for {key} is"


def recall_answer(code: int) -> str:
    """What follows `recall_stem`, terminator included."""
    return f" {code}."


def is_heldout_sum(a, b):
    """Whether a + b is kept for evaluation (about one pair in 18, either order). Integers or arrays."""
    return (a + 1) * (b + 1) % 17 == 1


def addition_exercise(rng: np.random.Generator, digits_a: int, digits_b: int | None = None) -> Exercise:
    """One held-out sum.

    Args:
      rng: the source of randomness.
      digits_a, digits_b: decimal digits of the summands (`digits_b` defaults to `digits_a`).
    """
    digits_b = digits_a if digits_b is None else digits_b
    while True:
        a = int(rng.integers(10 ** (digits_a - 1), 10**digits_a))
        b = int(rng.integers(10 ** (digits_b - 1), 10**digits_b))
        if is_heldout_sum(a, b):
            return Exercise(f"{a}+{b}=", f"{a + b}\n")


def recall_exercise(
    rng: np.random.Generator,
    distance_tokens: int,
    num_pairs: int,
    filler: str,
    encode: Encode,
    lead_tokens: int = 64,
) -> Exercise:
    """One recall question about the first of `num_pairs` codes, asked `distance_tokens` later.

    The other codes are distractors: one in four stands before the wanted one, the rest between it and the question,
    all in running text. The distance counts from the code's first digit to the place of the answer's; it
    falls short of the wish by less than one word of filler.

    Args:
      rng: the source of randomness.
      distance_tokens: wished distance; it must have room for the distractors (about 11 tokens each).
      num_pairs: codes in the prompt, the wanted one included.
      filler: natural text to draw the running text from; at least 3,000 words.
      encode: text to token ids, used only to count.
      lead_tokens: running text before the first line.
    """
    keys = rng.choice(len(KEYS), size=num_pairs, replace=False)
    codes = rng.integers(MIN_CODE, MAX_CODE + 1, size=num_pairs)
    lines = [recall_stem(KEYS[k]) + recall_answer(c) + "\n" for k, c in zip(keys, codes, strict=True)]
    answer_tokens = len(encode(recall_answer(codes[0])))
    after = [lines[i] for i in range(1, num_pairs) if i % 4 != 0]
    before = [lines[i] for i in range(1, num_pairs) if i % 4 == 0]

    words = filler.split()
    start = int(rng.integers(0, max(1, len(words) - 2500)))
    take = _word_taker(words[start:], encode)
    prompt = _interleave(rng, before, take, lead_tokens, encode) + lines[0]

    stem = recall_stem(KEYS[keys[0]])
    fixed = answer_tokens + len(encode("\n")) + len(encode(stem))
    body_tokens = distance_tokens - fixed
    between = _interleave(rng, after, take, body_tokens - sum(len(encode(line)) for line in after), encode)
    distance = fixed + len(encode(between))
    if abs(distance_tokens - distance) > 16:
        raise ValueError(f"distance {distance} tokens instead of {distance_tokens}: too little filler or room")
    return Exercise(prompt + between + stem, recall_answer(codes[0]), distance)


def _word_taker(words: list[str], encode: Encode) -> Callable[[int], str]:
    """A function that hands out the next words of the text as one line of at most so many tokens."""
    position = 0

    def take(num_tokens: int) -> str:
        nonlocal position
        taken, used = [], len(encode("\n"))
        while position < len(words):
            word = words[position] if not taken else " " + words[position]
            used += len(encode(word))
            if used > num_tokens:
                break
            taken.append(word)
            position += 1
        return "".join(taken) + "\n" if taken else ""

    return take


def _interleave(rng: np.random.Generator, lines: list[str], take: Callable, filler_tokens: int, encode: Encode) -> str:
    """`lines` in order, spread at random over about `filler_tokens` tokens of running text."""
    cuts = np.sort(rng.integers(0, max(1, filler_tokens), size=len(lines)))
    text, used = "", 0
    for line, cut in zip(lines, cuts, strict=True):
        piece = take(int(cut) - used)
        used += len(encode(piece))
        text += piece + line
    return text + take(filler_tokens - used)


def recall_set(
    seed: int, num: int, distance_tokens: int, num_pairs: int, filler: str, encode: Encode
) -> list[Exercise]:
    """`num` recall exercises at one distance; the same arguments give the same exercises."""
    rng = np.random.default_rng([seed, distance_tokens])
    return [recall_exercise(rng, distance_tokens, num_pairs, filler, encode) for _ in range(num)]


def addition_set(seed: int, num: int, digits_a: int, digits_b: int | None = None) -> list[Exercise]:
    """`num` held-out sums; the same arguments give the same exercises."""
    rng = np.random.default_rng([seed, digits_a, digits_b or digits_a])
    return [addition_exercise(rng, digits_a, digits_b) for _ in range(num)]
