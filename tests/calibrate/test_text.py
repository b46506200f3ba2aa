# SPDX-License-Identifier: Apache-2.0
"""Calibration texts come in files, packed files, JSON lines and folders; what is damaged is named."""

import gzip
import json
import lzma
import sys

import pytest

try:
    import zstandard
except ImportError:
    zstandard = None

from pagedweight_jax.calibrate.text import read_text
from pagedweight_jax.errors import UserError

TEXT = "Es war einmal,\nund \u00fcber allem lag Schnee.\n"


def jsonl(*texts):
    return "".join(json.dumps({"text": text, "url": "x"}) + "\n" for text in texts)


def _zst(data):
    """Two frames."""
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:9], data[9:]))


@pytest.fixture
def write(tmp_path):
    """Writes a text as its name says and returns the path."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pack = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": _zst}.get(path.suffix, bytes)
        path.write_bytes(pack(text.encode()))
        return path

    return write


ZST = pytest.param("a.zst", marks=pytest.mark.skipif(zstandard is None, reason="zstandard is not installed"))


@pytest.mark.parametrize("name", ["a.txt", "a", "a.txt.gz", "a.xz", ZST])
def test_a_text_is_itself_however_packed(write, name):
    assert read_text(write(name, TEXT)) == TEXT


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz"])
def test_json_lines_are_documents(write, name):
    documents = [TEXT, "second \u2028 line", "third"]
    assert read_text(write(name, jsonl(*documents) + "\n")) == "\n\n".join(documents)


def test_a_folder_is_its_files_by_name(write, tmp_path):
    write("in/b/1.jsonl.gz", jsonl("two", "three"))
    write("in/a.txt", "one")
    write("in/c.xz", "four")
    write("in/.hidden", "no")
    assert read_text(tmp_path / "in") == "one\n\ntwo\n\nthree\n\nfour"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: a folder without files"):
        read_text(tmp_path / "empty")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (jsonl("a") + "[1]\n", "line 2 is not a JSON object with a field text"),
        ("{\n", "line 1 is not a JSON object with a field text"),
        (jsonl("a", "b") + '{"body": "c"}\n', "line 3 is not a JSON object with a field text"),
        ('{"text": null}', "line 1: its field text must be a string, got NoneType"),
    ],
)
def test_a_line_without_text_is_named(write, lines, message):
    with pytest.raises(UserError, match=rf"a\.jsonl: {message}"):
        read_text(write("a.jsonl", lines))


@pytest.mark.parametrize("name", ["a.gz", "a.xz", ZST])
@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"not packed", lambda b: b[:12] + b[13:]])
def test_a_damaged_file_is_named(write, name, damage):
    path = write(name, TEXT * 50)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=rf"{name}: cannot be read as UTF-8 text"):
        read_text(path)


def test_a_text_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"a\.txt: no such file"):
        read_text(tmp_path / "a.txt")


def test_zst_without_its_package_says_what_to_install(write, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match=r"a\.zst: to read \.zst, pip install zstandard"):
        read_text(write("a", TEXT).rename(tmp_path / "a.zst"))
