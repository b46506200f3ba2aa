# SPDX-License-Identifier: Apache-2.0
from demo_data import END_ID
from exercises import KEYS
from train_tokenizer import train_tokenizer
from transformers import AutoTokenizer


def test_every_digit_is_one_token(demo_tokenizer, demo_encode):
    with_digits = [token for token in demo_tokenizer.get_vocab() if any(c in "0123456789" for c in token)]
    assert sorted(with_digits) == list("0123456789")
    assert len(demo_encode("2048")) == 4
    assert demo_tokenizer.decode(demo_encode("347+582=929\n")) == "347+582=929\n"


def test_size_and_special_ids(demo_tokenizer):
    assert 4096 <= demo_tokenizer.get_vocab_size() <= 8192
    assert demo_tokenizer.token_to_id("<|endoftext|>") == END_ID == 0
    assert demo_tokenizer.token_to_id("<|pad|>") == 1


def test_every_key_word_is_one_token(demo_encode):
    assert len(KEYS) == len(set(KEYS)) == 128
    assert [key for key in KEYS if len(demo_encode(f" {key}")) != 1] == []


def test_any_bytes_survive(demo_tokenizer, demo_encode):
    text = "naïve café – 東京 \t\n  🜁 <tag>"
    assert demo_tokenizer.decode(demo_encode(text)) == text


def test_transformers_reads_the_folder_alike(demo_folder, demo_encode, heldout_text):
    tokenizer = AutoTokenizer.from_pretrained(demo_folder)
    assert tokenizer(heldout_text[:5000])["input_ids"] == demo_encode(heldout_text[:5000])
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)


def test_training_keeps_digits_apart():
    tokenizer = train_tokenizer(["in 1999 and 1999 and 1999 they ran and ran"] * 50, vocab_entries=300)
    assert tokenizer.encode("1999").tokens == ["1", "9", "9", "9"]
    assert len(tokenizer.encode(" and").tokens) == 1
