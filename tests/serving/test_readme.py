# SPDX-License-Identifier: Apache-2.0
"""The README's examples run as they stand, on a tiny checkpoint in place of the demo's."""

import re
from pathlib import Path

import numpy as np
import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def own_loop():
    (code,) = [example for example in EXAMPLES if "decode_loop" in example]
    return code


def test_the_loop_of_ones_own_runs_and_is_ten_lines(own_loop, tiny, monkeypatch):
    statements = [line for line in own_loop.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(statements) <= 10
    names = {}
    exec(own_loop.replace('"demo.paged"', repr(str(tiny.checkpoint.path))), names)
    tokens_NB = np.asarray(names["tokens_NB"])
    assert tokens_NB.shape == (16, 8)
    assert np.all(tokens_NB[:, 1:] == -1)


def test_every_file_that_the_readme_names_exists():
    root = Path(__file__).parents[2]
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (root / link).exists()] == []
