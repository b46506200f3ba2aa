# SPDX-License-Identifier: Apache-2.0
"""``pagedweight calibrate``: policy.json appears whole or not at all, and the run says what it found."""

import errno
import json
import os
import shutil
from dataclasses import asdict

import numpy as np
import pytest

from pagedweight_jax.calibrate import residual_run, sequences
from pagedweight_jax.checkpoint.paged import open_checkpoint, verify
from pagedweight_jax.checkpoint.policy import load_calibration, read_policy
from pagedweight_jax.cli import main
from pagedweight_jax.planning.damage import global_damage

SMALL = ["--samples", "6", "--sequence-length", "64"]


@pytest.fixture(scope="module")
def converted(hf_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("paged") / "tiny"
    assert main(["convert", str(hf_folder), str(out), "--bits", "3..5", *SMALL]) == 0
    return out


@pytest.fixture
def copy(converted, tmp_path):
    return shutil.copytree(converted, tmp_path / "tiny")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder, but=""):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != but}


def refused(result, begins="pagedweight: "):
    """The one line of a refusal."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith(begins)
    return err


def test_calibrate_writes_the_policy_and_says_how_good_it_is(run_cli, copy, tmp_path):
    before = contents(copy)
    code, out, err = run_cli("calibrate", copy, *SMALL, "--plot", tmp_path / "fit.png")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == str(copy / "policy.json")
    assert "gate_up" in out
    assert "5→4" in out
    assert "…" not in out
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert (tmp_path / "fit.png").stat().st_size > 10_000
    assert names(tmp_path) == ["fit.png", "tiny"]
    assert contents(copy, but="policy.json") == before
    assert verify(copy) == []

    checkpoint = open_checkpoint(copy)
    online = read_policy(checkpoint)
    np.testing.assert_allclose(online.damage_LEUR, global_damage(checkpoint.sensitivity), rtol=0.1)
    assert load_calibration(checkpoint).heads is not None


def test_json_is_what_the_policy_holds(run_cli, copy):
    code, out, _ = run_cli("calibrate", copy, *SMALL, "--json", "--seed", 3)
    summary = json.loads(out)
    online = read_policy(open_checkpoint(copy))
    assert code == 0
    assert summary["path"] == str(copy / "policy.json")
    assert summary["run"] == vars(online.run)
    assert summary["run"]["seed"] == 3
    assert summary["policy"]["alpha"] == online.policy.alpha
    assert [(one["kind"], one["from_bits"]) for one in summary["held_out"]] == [
        ("gate_up", 5),
        ("gate_up", 4),
        ("down", 5),
        ("down", 4),
    ]
    assert summary["foresight"]["tokens_before"] == 32
    assert summary["foresight"]["cost"]["g"] == [1, 1, 1]
    assert summary["search"] == {}


def test_pins_are_kept_with_the_policy(run_cli, copy):
    code, out, _ = run_cli("calibrate", copy, *SMALL, "--pin", "0.*=4", "--pin", "*.1=5")
    assert code == 0
    assert "pinned: layer 0, expert all, at least 4 bits" in out
    calibration = load_calibration(open_checkpoint(copy))
    assert (calibration.pinned_LEU[0, 0] == 4).all()
    assert (calibration.pinned_LEU[:, 1] == 5).all()


def test_verify_reads_the_policy_too(run_cli, copy):
    assert run_cli("calibrate", copy, *SMALL)[0] == 0
    assert run_cli("verify", copy)[0] == 0
    path = copy / "policy.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"policy": content["policy"] | {"alpha": 0.123}}))
    assert "policy.json: damaged or edited" in refused(run_cli("verify", copy), begins=f"{copy}/")
    path.write_text(json.dumps(content))
    assert run_cli("verify", copy)[0] == 0


def test_another_text_gives_another_policy(run_cli, copy, tmp_path):
    run_cli("calibrate", copy, *SMALL)
    own = read_policy(open_checkpoint(copy))
    parts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    parts[0].write_text("the quick brown fox " * 40)
    parts[1].write_text("JUMPS OVER 13 LAZY DOGS! " * 40)
    assert run_cli("calibrate", copy, *SMALL, "--text", *parts)[0] == 0
    other = read_policy(open_checkpoint(copy))
    assert other.run.text_sha256 != own.run.text_sha256
    assert np.abs(np.log(other.damage_LEUR / own.damage_LEUR)).max() > 0.2
    assert np.abs(other.mass_LE - own.mass_LE).max() > 0.01


def test_a_run_that_was_cut_short_goes_on(run_cli, copy, tmp_path, monkeypatch):
    assert run_cli("calibrate", copy, *SMALL)[0] == 0
    whole = (copy / "policy.json").read_bytes()
    (copy / "policy.json").unlink()

    read_layer = sequences.read_layer
    with monkeypatch.context() as context:
        context.setattr(sequences, "read_layer", lambda c, layer: 1 / 0 if layer else read_layer(c, layer))
        with pytest.raises(ZeroDivisionError):
            main(["calibrate", str(copy), *SMALL])
    assert names(tmp_path) == ["tiny", "tiny.policy.partial"]
    assert not (copy / "policy.json").exists()

    monkeypatch.setattr(sequences, "read_layer", lambda c, layer: read_layer(c, layer) if layer else 1 / 0)
    code, _, err = run_cli("calibrate", copy, *SMALL)
    assert code == 0
    assert "continuing after 2 finished steps" in err
    assert (copy / "policy.json").read_bytes() == whole
    assert names(tmp_path) == ["tiny"]


@pytest.mark.parametrize("last", ["foresight_report", "write_policy"])
def test_what_was_measured_is_kept_until_the_policy_is_on_the_disk(run_cli, copy, tmp_path, monkeypatch, last):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as context:
        context.setattr(residual_run, last, full)
        assert "no space left on the disk; 3 finished steps are kept" in refused(run_cli("calibrate", copy, *SMALL))
    assert names(tmp_path) == ["tiny", "tiny.policy.partial"]
    assert not (copy / "policy.json").exists()
    monkeypatch.setattr(sequences, "read_layer", lambda *_: 1 / 0)
    assert run_cli("calibrate", copy, *SMALL)[0] == 0
    assert read_policy(open_checkpoint(copy)) is not None
    assert names(tmp_path) == ["tiny"]


def test_a_search_keeps_a_journal_and_what_is_better(run_cli, copy, tmp_path, monkeypatch):
    assert run_cli("calibrate", copy, *SMALL)[0] == 0
    start = read_policy(open_checkpoint(copy)).policy
    journal = tmp_path / "search.jsonl"
    code, out, _ = run_cli("calibrate", copy, *SMALL, "--search", journal, "--json")
    assert code == 0
    found = json.loads(out)["search"]
    assert found["relative"] < 1, "a search that finds nothing shows nothing here"
    assert found["best_policy"] != as_json(start)
    assert found["best_policy"]["half_life_tokens"] == start.half_life_tokens  # no trial can tell one from another
    kept = read_policy(open_checkpoint(copy)).policy
    assert as_json(kept) == (found["best_policy"] if found["relative_on_other_text"] < 1 else as_json(start))
    lines = journal.read_text().splitlines()
    assert found["trials"] <= len(lines) - 1
    policy = (copy / "policy.json").read_bytes()
    run_cli("calibrate", copy, *SMALL, "--search", journal)
    assert journal.read_text().splitlines() == lines  # nothing is tried twice
    assert (copy / "policy.json").read_bytes() == policy

    monkeypatch.setattr(sequences, "read_layer", lambda *_: 1 / 0)
    assert "of a search on" in refused(run_cli("calibrate", copy, *SMALL, "--search", journal, "--seed", "1"))
    assert "tiny: not a file" in refused(run_cli("calibrate", copy, *SMALL, "--search", copy))
    assert (copy / "policy.json").read_bytes() == policy


def as_json(policy):
    return json.loads(json.dumps(asdict(policy)))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--samples", "1"), "need 2 samples at least, one to fit and one to try it on, got 1"),
        (("--sequence-length", "63"), "must be a multiple of 4 tokens and within the model's context of 512, got 63"),
        (("--sequence-length", "1024"), "within the model's context of 512, got 1024 (--sequence-length)"),
        (("--samples", "3", "--search", "journal.jsonl"), "a search needs 4 samples, 2 to tune on and 2 to confirm"),
        (("--samples", "5000", "--sequence-length", "64"), "calibration text too short"),
        (("--text", "missing.txt"), "missing.txt: no such file"),
        (("--seed", "-1"), "calibration: seed: -1 is less than 0"),
        (("--pin", "0=5"), "pin '0=5': write LAYER.EXPERT=BITS"),
        (("--pin", "9.*=5"), "layer 9 is not one of 0.."),
        (("--plot", "fit.words"), "fit.words: its suffix must say which kind of figure, one of"),
        (("--plot", "nowhere/fit.png"), "nowhere/fit.png: no such folder"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(run_cli, copy, tmp_path, options, problem):
    before = names(copy)
    assert problem in refused(run_cli("calibrate", copy, *options))
    assert (names(copy), names(tmp_path)) == (before, ["tiny"])


def test_what_is_no_checkpoint_is_refused(run_cli, tmp_path):
    assert "no such folder" in refused(run_cli("calibrate", tmp_path / "nothing"))


def test_a_checkpoint_of_one_bitwidth_has_nothing_to_choose(run_cli, hf_folder, tmp_path):
    assert run_cli("convert", hf_folder, tmp_path / "one", "--bits", "3", *SMALL)[0] == 0
    assert "it has 3 bits only" in refused(run_cli("calibrate", tmp_path / "one", *SMALL))
    assert not (tmp_path / "one" / "policy.json").exists()
