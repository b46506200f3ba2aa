# SPDX-License-Identifier: Apache-2.0
"""The tokenizer that lies beside a model's weights, in a Hugging Face folder as in a paged checkpoint."""

import os
from pathlib import Path

from pagedweight_jax.errors import UserError

VOCABULARIES = ("tokenizer.json", "vocab.json", "tokenizer.model")


def load_tokenizer(folder: Path):
    """Returns the folder's tokenizer, a transformers ``PreTrainedTokenizerBase``; never asks the network.

    Raises:
      UserError: there is none.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises PyTorch, which nothing here needs
    from transformers import AutoTokenizer  # slow to import, and not needed for token ids

    if not any((Path(folder) / name).is_file() for name in VOCABULARIES):  # transformers would make up an empty one
        raise UserError(f"{folder}: no tokenizer (none of {', '.join(VOCABULARIES)})")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the parsers raise many kinds, plain Exception among them; all mean damaged files
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(f"{folder}: no tokenizer that can be loaded ({why})") from error
