# SPDX-License-Identifier: Apache-2.0
"""The command line: results on stdout, everything else on stderr, a user's mistake in one line and exit code 2."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pagedweight_jax.calibrate.text import OPENERS
from pagedweight_jax.cli import main
from pagedweight_jax.cli.checkpoint import parse_bits
from pagedweight_jax.errors import UserError
from pagedweight_jax.units import format_count, format_size, parse_size

SMALL = ["--bits", "2..4", "--samples", "8", "--sequence-length", "64"]


@pytest.fixture(scope="module")
def converted(hf_folder, tmp_path_factory):
    """A checkpoint made by the command line."""
    out = tmp_path_factory.mktemp("paged") / "tiny"
    assert main(["convert", str(hf_folder), str(out), *SMALL]) == 0
    return out


def refused(result):
    """The one line of a refusal."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("pagedweight: ")
    return err


@pytest.mark.parametrize("verb", ["convert", "calibrate"])
def test_help_names_every_packing_that_a_text_may_have(capsys, verb):
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    assert f"{', '.join(OPENERS)}: packed" in " ".join(capsys.readouterr().out.split())


def test_convert_says_what_it_did(run_cli, hf_folder, tmp_path):
    code, out, err = run_cli("convert", hf_folder, tmp_path / "out", *SMALL)
    assert code == 0
    assert out.splitlines()[0] == str(tmp_path / "out")
    assert "qwen2_moe" in out
    text, peak, seconds = err.splitlines()
    assert text == f"calibration text: {hf_folder / 'text' / 'calibration.txt'}"
    assert peak.startswith("peak host memory ")
    assert "128 KiB of hidden states in memory" in peak  # 8 x 64 tokens of 64 float32
    stages = r"read [\d.]+, calibrate [\d.]+, quantize [\d.]+, pack [\d.]+, write [\d.]+"
    assert re.fullmatch(rf"seconds: {stages} \(reading and writing go on beside the rest\)", seconds)


def test_a_dry_run_reads_no_weight_and_writes_nothing(run_cli, hf_folder, converted, tmp_path, monkeypatch):
    monkeypatch.setattr("pagedweight_jax.checkpoint.hf.read_into", None)
    code, out, _ = run_cli("convert", hf_folder, tmp_path / "out", *SMALL, "--dry-run", "--json", "--ram", "100KiB")
    assert code == 0
    assert list(tmp_path.iterdir()) == []
    costs = json.loads(out)
    file_bytes = (hf_folder / "model.safetensors").stat().st_size
    assert 0.9 * file_bytes < costs["read_bytes"] < file_bytes  # without its header
    assert costs["hidden_bytes"] == 8 * 64 * 64 * 4
    assert costs["dense_bytes"] == json.loads(run_cli("inspect", converted, "--json")[1])["dense_bytes"]
    assert not costs["hidden_in_memory"]
    pages = sum(path.stat().st_size for path in (converted / "arrays" / "pages").rglob("*") if path.is_file())
    assert 0.5 * pages < costs["pages_bytes"] < costs["disk_bytes"] < costs["disk_free_bytes"]
    code, out, _ = run_cli("convert", hf_folder, tmp_path / "out", *SMALL, "--dry-run")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["reads", "writes", "disk", "memory", "device"]


def test_convert_prints_json_and_takes_another_text(run_cli, hf_folder, tmp_path):
    text = tmp_path / "other.txt"
    text.write_text("the quick brown fox " * 40)
    options = ("--bits", 3, "--samples", 2, "--text", text, "--json", "--sequence-length", 64, "--seed", 5)
    code, out, err = run_cli("convert", hf_folder, tmp_path / "out", *options)
    assert code == 0
    summary = json.loads(out)
    assert [width["bits"] for width in summary["widths"]] == [3]
    assert summary["calibration"]["seed"] == 5
    assert summary["conversion"]["peak_bytes"] > summary["conversion"]["layer_bytes"] > 0
    assert "calibration text" not in err


def test_inspect_prints_the_arithmetic(run_cli, converted):
    code, out, err = run_cli("inspect", converted, "--json")
    assert (code, err) == (0, "")
    summary = json.loads(out)
    assert summary["path"] == str(converted)
    # gate_up 64x64: 512 bytes a plane, 2^b float16 a row; down 64x32: 256 bytes a plane. Frames of 512 bytes.
    assert summary["frame_bytes"] == 512
    planes = {"gate_up": 512, "down": 256}
    resident = {name: {bits: 0 for bits in (1, 2, 3, 4)} for name in planes}
    payload = dict.fromkeys((1, 2, 3, 4), 0)
    for page in range(4):
        lut = 64 * 2 ** (page + 1) * 2 if page + 1 >= 2 else 0
        for name, plane in planes.items():
            start = -(-plane // min(512, lut)) * min(512, lut) if lut else plane
            resident[name][page + 1] = resident[name].get(page, 0) + -(-(start + lut) // 512) * 512
        payload[page + 1] = payload.get(page, 0) + sum(planes.values()) + 2 * lut
    for width in summary["widths"]:
        bits = width["bits"]
        total = resident["gate_up"][bits] + resident["down"][bits]
        assert width["block_bytes"] == {name: resident[name][bits] for name in planes}
        assert width["experts_bytes"] == 8 * total
        assert width["bits_per_weight"] == pytest.approx(8 * total / (64 * 64 + 64 * 32), rel=1e-12)
        assert width["padding_share"] == pytest.approx(1 - payload[bits] / total, abs=1e-12)
        assert width["lut_share"] == pytest.approx(1 - bits * 768 / payload[bits], abs=1e-12)
        assert width["own_lut_experts_bytes"] == 8 * (bits * 768 + 2 * 64 * 2**bits * 2)
    assert summary["model"]["paged_parameters"] == 8 * (64 * 64 + 64 * 32)
    assert summary["dense_bytes"] == 4 * summary["model"]["dense_parameters"]
    assert summary["calibration"]["experts"] == 8


def test_inspect_reports_coverage_by_layer(run_cli, converted):
    from pagedweight_jax.checkpoint.paged import open_checkpoint

    layers = json.loads(run_cli("inspect", converted, "--json")[1])["calibration"]["layers"]
    tokens_LE = open_checkpoint(converted).tokens
    assert [layer["layer"] for layer in layers] == [0, 1]
    for layer, tokens_E in zip(layers, tokens_LE):
        seen = sorted(tokens_E.tolist())
        assert layer["tokens_per_expert"] == {"fewest": seen[0], "median": (seen[1] + seen[2]) / 2, "most": seen[3]}
        assert layer["uncalibrated_share"] == sum(tokens < 32 for tokens in seen) / 4
    fewest, share = layers[0]["tokens_per_expert"]["fewest"], layers[0]["uncalibrated_share"]
    lines = [line.split() for line in run_cli("inspect", converted)[1].splitlines()]
    assert [line[-1] for line in lines if line[:2] == ["0", str(fewest)]] == [f"{share:.0%}"]


def test_inspect_fits_a_terminal_of_80_columns(run_cli, converted, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run_cli("inspect", converted)
    assert code == 0
    assert "…" not in out
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert [line.split()[0] for line in out.splitlines() if line.lstrip()[:1].isdigit()][-3:] == ["2", "3", "4"]


def test_verify_finds_nothing_wrong_or_says_what_is(run_cli, converted, tmp_path):
    code, out, err = run_cli("verify", converted)
    assert (code, err) == (0, "")
    assert str(converted) in out
    assert json.loads(run_cli("verify", converted, "--json")[1])["ok"] is True

    copy = shutil.copytree(converted, tmp_path / "copy")
    (copy / "tokenizer.json").write_text("{}")
    (copy / "text" / "calibration.txt").unlink()
    code, out, err = run_cli("verify", copy)
    assert (code, out) == (2, "")
    assert sorted(line.split(": ")[0] for line in err.splitlines()) == [
        str(copy / "text" / "calibration.txt"), str(copy / "tokenizer.json")
    ]  # fmt: skip
    code, out, _ = run_cli("verify", copy, "--json")
    assert code == 2
    assert json.loads(out) == {"path": str(copy), "ok": False, "problems": err.splitlines()}

    shutil.rmtree(copy / "arrays" / "pages")
    code, out, err = run_cli("verify", copy, "--json")
    *shown, rest = err.splitlines()
    problems = json.loads(out)["problems"]
    assert (code, shown, rest) == (2, problems[:20], f"and {len(problems) - 20} more; --json lists all")


def test_verify_recomputes_errors_from_the_source(run_cli, hf_folder, converted):
    code, out, err = run_cli("verify", converted, "--source", hf_folder, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert (result["ok"], result["blocks"]) == (True, 16)
    assert result["worst_relative_difference"] < 1e-6
    code, out, _ = run_cli("verify", converted, "--source", hf_folder)
    assert code == 0
    assert "the errors of 16 linear-blocks are the stored sensitivities" in out


def test_mistakes_are_one_line_and_exit_code_2(run_cli, hf_folder, converted, tmp_path):
    assert "no such folder" in refused(run_cli("inspect", tmp_path / "nowhere"))
    assert "no such folder" in refused(run_cli("verify", tmp_path / "nowhere"))
    assert "no manifest.json" in refused(run_cli("inspect", hf_folder))
    assert "exists already (--overwrite replaces it)" in refused(run_cli("convert", hf_folder, converted))
    assert "bits 0..8" in refused(run_cli("convert", hf_folder, tmp_path / "out", "--bits", "0..8"))
    assert "bits 'wide'" in refused(run_cli("convert", hf_folder, tmp_path / "out", "--bits", "wide"))
    assert "is not a folder that can be written to" in refused(
        run_cli("convert", hf_folder, hf_folder / "config.json" / "out", *SMALL)
    )
    text = tmp_path / "short.txt"
    text.write_text("short")
    code, out, err = run_cli("convert", hf_folder, tmp_path / "out", "--text", text)
    assert (code, out) == (2, "")
    assert "5 tokens are 0 sequences of 512, need 100" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ((), "the following arguments are required: VERB (pagedweight --help)"),
        (("inspect",), "the following arguments are required: CHECKPOINT (pagedweight inspect --help)"),
        (("generate", "x", "--prompt", "hi", "--seed", "x"), "argument --seed: invalid int value: 'x' (pagedweight"),
        (("plot", "timeline", "no.jsonl", "-o", "x.png"), "no.jsonl: no such file"),
        (("inspect", "x", "--jsno"), "unrecognized arguments: --jsno (pagedweight --help)"),
    ],
)
def test_wrong_arguments_are_one_line_too(run_cli, argv, line):
    assert refused(run_cli(*argv)).startswith(f"pagedweight: {line}")


def test_versions_are_told(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert not end.value.code
    assert re.fullmatch(r"pagedweight \d+\.\d+\.\d+, JAX \d+\.\d+\.\d+, Python 3\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_reader_that_leaves_is_no_error(converted, options):
    command = [sys.executable, "-m", "pagedweight_jax.cli", "inspect", str(converted), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 1


def test_a_missing_file_is_one_line_too(run_cli, monkeypatch):
    def missing(args):
        Path("/nowhere/at/all").read_text()

    monkeypatch.setattr("pagedweight_jax.cli.checkpoint.inspect", missing)
    assert "/nowhere/at/all" in refused(run_cli("inspect", "x"))


def test_other_errors_are_not_hidden(run_cli, monkeypatch):
    def broken(args):
        raise ZeroDivisionError

    monkeypatch.setattr("pagedweight_jax.cli.checkpoint.inspect", broken)
    with pytest.raises(ZeroDivisionError):
        run_cli("inspect", "x")


def test_overwrite(run_cli, hf_folder, converted, tmp_path):
    copy = shutil.copytree(converted, tmp_path / "copy")
    code, out, _ = run_cli("convert", hf_folder, copy, "--overwrite", "--json", *SMALL, "--bits", "3..3")
    assert code == 0
    assert [width["bits"] for width in json.loads(out)["widths"]] == [3]


def test_it_runs_as_a_module_and_help_needs_no_jax():
    program = (
        "import sys, runpy\n"
        "sys.argv = ['pagedweight', '--help']\n"
        "try:\n"
        "    runpy.run_module('pagedweight_jax.cli', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    sys.exit(end.code or ('jax' in sys.modules))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for verb in ("convert", "inspect", "verify"):
        assert verb in result.stdout


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1073741824", 1 << 30),
        ("10GiB", 10 << 30),
        ("512MiB", 512 << 20),
        ("1.5 KiB", 1536),
        ("10GB", 10**10),
        (" 2TiB ", 2 << 40),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "GiB", "-1GiB", "10 gigs", "1e9", "10Gi", "1.5.2MiB", "0.1"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UserError, match="write it like 10GiB"):
        parse_size(text)


def test_bits_are_read():
    assert parse_bits("3..8") == (3, 8)
    assert parse_bits("4") == (4, 4)
    for text in ("", "3-8", "3..", "..8", "a..b"):
        with pytest.raises(UserError, match=r"write a range like 3\.\.8"):
            parse_bits(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1024, "1.00 KiB"), (18432, "18.0 KiB"), (134 << 20, "134 MiB"),
     (1 << 30, "1.00 GiB"), (3 << 50, "3072 TiB")],
)  # fmt: skip
def test_sizes_are_written_to_three_digits(size, text):
    assert format_size(size) == text


def test_counts_are_written_to_three_digits():
    assert [format_count(count) for count in (0, 999, 49152, 2_700_000, 14_300_000_000)] == [
        "0", "999", "49.2 K", "2.70 M", "14.3 B"
    ]  # fmt: skip
