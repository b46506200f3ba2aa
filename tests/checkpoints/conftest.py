# SPDX-License-Identifier: Apache-2.0
"""The demo model's scripts are not a package: their folder goes on the path."""

import sys
from pathlib import Path

import pytest

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
sys.path.insert(0, str(CHECKPOINTS))


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return CHECKPOINTS / "demo-moe"


@pytest.fixture(scope="session")
def demo_tokenizer(demo_folder):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(demo_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def demo_encode(demo_tokenizer):
    """Text to ids under the demo tokenizer."""
    return lambda text: demo_tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="session")
def heldout_text(demo_folder) -> str:
    return (demo_folder / "text" / "heldout.txt").read_text(encoding="utf-8")
