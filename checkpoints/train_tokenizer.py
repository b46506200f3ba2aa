# SPDX-License-Identifier: Apache-2.0
"""Train the demo model's byte-level BPE: 4,096 entries, every digit a token of its own.

    python checkpoints/train_tokenizer.py --data CORPUS --out checkpoints/demo-moe
"""

import argparse
import json
from pathlib import Path

from demo_data import END_OF_TEXT, read_documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_ENTRIES = 4096
PAD = "<|pad|>"
SAMPLE_CHARS = 24_000_000


def train_tokenizer(texts: list[str], vocab_entries: int = VOCAB_ENTRIES) -> Tokenizer:
    """A byte-level BPE whose id 0 ends a document and id 1 pads; digits never merge."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_entries,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json as `transformers.AutoTokenizer` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def sample_texts(documents: list[str], sample_chars: int = SAMPLE_CHARS) -> list[str]:
    """An even cut of every document, `sample_chars` characters in all."""
    share = min(1.0, sample_chars / sum(map(len, documents)))
    return [document[: max(500, int(len(document) * share))] for document in documents]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of .txt or .txt.xz files")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    save_tokenizer(train_tokenizer(sample_texts(read_documents(args.data))), args.out)


if __name__ == "__main__":
    main()
