# SPDX-License-Identifier: Apache-2.0
import re

import numpy as np
import pytest
from demo_data import ANSWER, TEXT, ExerciseMaker, addition_sequence, encode_pieces, recall_sequence
from exercises import addition_set, is_heldout_sum, recall_set

LENGTH = 1025
STATED = re.compile(r"The code for (\w+) is (\d{3})\.\n")


@pytest.fixture(scope="module")
def corpus(demo_encode, heldout_text):
    return np.array(demo_encode(heldout_text), np.uint16)


@pytest.mark.parametrize(("digits_a", "digits_b"), [(2, 2), (2, 3), (3, 3)])
def test_sums_are_right_held_out_and_of_the_digits_asked(digits_a, digits_b):
    for exercise in addition_set(1, 40, digits_a, digits_b):
        a, b = exercise.prompt.removesuffix("=").split("+")
        assert (len(a), len(b)) == (digits_a, digits_b)
        assert exercise.answer == f"{int(a) + int(b)}\n"
        assert is_heldout_sum(int(a), int(b))


def test_sets_follow_from_their_seed(demo_encode, heldout_text):
    assert addition_set(1, 5, 3) == addition_set(1, 5, 3) != addition_set(2, 5, 3)
    one, again, other = (recall_set(seed, 2, 200, 6, heldout_text, demo_encode) for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize(("distance", "num_pairs"), [(50, 4), (200, 8), (1500, 8)])
def test_recall_asks_for_a_code_stated_once_at_the_distance_asked(distance, num_pairs, demo_encode, heldout_text):
    for exercise in recall_set(3, 6, distance, num_pairs, heldout_text, demo_encode):
        stated = STATED.findall(exercise.prompt)
        assert len(stated) == num_pairs == len({key for key, _ in stated})
        stem = exercise.prompt.rsplit("\n", 1)[1]
        asked = re.fullmatch(r"The code for (\w+) is", stem).group(1)
        code = dict(stated)[asked]
        assert exercise.answer == f" {code}."
        before = exercise.prompt[: exercise.prompt.index(f"{stem} {code}.") + len(stem) + 1]
        measured = len(demo_encode(exercise.prompt + " ")) - len(demo_encode(before))
        assert measured == exercise.distance_tokens
        assert distance - 8 <= measured <= distance


def test_a_wrong_distance_is_refused(demo_encode):
    with pytest.raises(ValueError, match="too little filler"):
        recall_set(0, 1, 1500, 8, "only a few words", demo_encode)


def test_prompt_and_answer_encode_apart_as_together(demo_encode, heldout_text):
    for exercise in [*recall_set(4, 4, 100, 8, heldout_text, demo_encode), *addition_set(4, 4, 3)]:
        apart = demo_encode(exercise.prompt) + demo_encode(exercise.answer)
        assert apart == demo_encode(exercise.prompt + exercise.answer)


def test_training_never_shows_a_held_out_sum(corpus, demo_tokenizer):
    rng, pieces = np.random.default_rng(0), encode_pieces(demo_tokenizer)
    seen = 0
    for _ in range(4):
        ids, _ = addition_sequence(rng, corpus, pieces, LENGTH)
        for a, b, total in re.findall(r"(?:^|\n)(\d+)\+(\d+)=(\d+)(?=\n)", demo_tokenizer.decode(ids.tolist())):
            assert int(a) + int(b) == int(total)
            assert not is_heldout_sum(int(a), int(b))
            seen += 1
    assert seen > 100


def test_about_one_sum_in_eighteen_is_held_out():
    a, b = np.meshgrid(np.arange(100, 1000), np.arange(100, 1000))
    assert 0.05 < is_heldout_sum(a, b).mean() < 0.06
    assert np.array_equal(is_heldout_sum(a, b), is_heldout_sum(b, a))


def test_training_recall_repeats_what_was_stated_and_is_plain_text_to_the_tokenizer(corpus, demo_tokenizer):
    rng, pieces = np.random.default_rng(1), encode_pieces(demo_tokenizer)
    ids, codes = recall_sequence(rng, corpus, pieces, LENGTH)
    text = demo_tokenizer.decode(ids.tolist())
    assert demo_tokenizer.encode(text, add_special_tokens=False).ids[: LENGTH - 3] == ids[: LENGTH - 3].tolist()
    codes_by_key: dict[str, set] = {}
    for key, code in STATED.findall(text):
        codes_by_key.setdefault(key, set()).add(code)
    assert len(codes_by_key) >= 3
    assert all(len(values) == 1 for values in codes_by_key.values())
    assert re.fullmatch(r"[\d.]+", demo_tokenizer.decode(ids[codes == ANSWER].tolist()).replace(" ", ""))
    assert (codes == TEXT).mean() > 0.2


def test_a_step_of_exercises_depends_on_its_number_alone(tmp_path, corpus, demo_tokenizer):
    np.save(tmp_path / "train.npy", corpus)
    maker = ExerciseMaker(tmp_path / "train.npy", encode_pieces(demo_tokenizer), 257, 2, 1, seed=5)
    (ids, codes), (same, _), (other, _) = maker(3), maker(3), maker(4)
    assert ids.shape == codes.shape == (3, 257)
    assert np.array_equal(ids, same)
    assert not np.array_equal(ids, other)
