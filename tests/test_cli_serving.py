# SPDX-License-Identifier: Apache-2.0
"""The verbs that run a checkpoint: text and numbers on stdout, mistakes in one line."""

import json
import re
from contextlib import contextmanager

import numpy as np
import pytest

from pagedweight_jax.checkpoint.hf import load_config, load_weights
from pagedweight_jax.checkpoint.tokenizer import load_tokenizer
from pagedweight_jax.cli import main, serving
from pagedweight_jax.config import ServeConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.evaluate import pressure
from pagedweight_jax.evaluate import schedule as schedule_module
from pagedweight_jax.evaluate.perplexity import perplexity, score_dense, split_windows
from pagedweight_jax.evaluate.schedule import read_schedule
from pagedweight_jax.serving import engine as engine_module
from pagedweight_jax.serving import llm as llm_module
from pagedweight_jax.serving.events import EventLog

TEXT = "the rain in spain stays mainly in the plain, " * 12
SIZES = ("--window", 128, "--batch", 2)
"""Of all that is evaluated: one compilation for all."""


@pytest.fixture(scope="module")
def checkpoint(hf_folder, tmp_path_factory):
    """The tiny model at 6 bits, which is as good as its source."""
    out = tmp_path_factory.mktemp("paged") / "tiny"
    assert main(["convert", str(hf_folder), str(out), "--bits", "6", "--samples", "8", "--sequence-length", "64"]) == 0
    return out


def test_generate_continues_every_prompt(run_cli, checkpoint):
    code, out, err = run_cli(
        "generate", checkpoint, "--prompt", "the rain", "--prompt", "in spain", "--max-tokens", 9, "--json"
    )
    assert code == 0
    outputs = json.loads(out)
    assert [output["prompt"] for output in outputs] == ["the rain", "in spain"]
    for output in outputs:
        assert output["finish_reason"] in ("stop", "length")
        assert 1 <= len(output["token_ids"]) <= 9
    memory, summary = err.splitlines()
    assert re.match(r"budget [\d.]+ MiB: dense weights .*; arena: weight pages and KV cache .*; pages on the", memory)
    assert "mean bits 6.00, budget" in summary


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "message"),
    [
        (("the rain", ""), 9, "prompt 1: there is no token in ''"),
        (("the rain",), 505, "prompt 0: its 8 tokens and 505 to generate make 513, the model's context is 512 tokens"),
        (("a\udcff",), 9, r"prompt 0: a prompt must be text: character 1 is '\udcff'"),
        (("the rain",), 0, "max_tokens must be a whole number, at least 1, got 0"),
    ],
)
def test_prompts_are_refused_before_anything_takes_time(run_cli, checkpoint, monkeypatch, prompts, max_tokens, message):
    monkeypatch.setattr(llm_module, "Engine", lambda *_, **__: pytest.fail("an engine was built"))
    options = [option for prompt in prompts for option in ("--prompt", prompt)]
    code, out, err = run_cli("generate", checkpoint, *options, "--max-tokens", max_tokens)
    assert (code, out, err) == (2, "", f"pagedweight: {message}\n")


@pytest.fixture
def configs(monkeypatch):
    """The configurations that ``generate`` would have served; it ends there."""
    seen = []

    def refuse(path, config, progress):
        seen.append(config)
        raise UserError("enough seen")

    monkeypatch.setattr(llm_module, "LLM", refuse)
    return seen


def test_generate_makes_room_for_the_longest_prompt(run_cli, checkpoint, configs, monkeypatch):
    monkeypatch.setattr(ServeConfig, "max_model_len", 64)  # the context that is taken where prompts are short
    for prompt in ("short", "long" * 20):
        run_cli("generate", checkpoint, "--prompt", prompt, "--prompt", "short", "--max-tokens", 20)
    assert [config.max_model_len for config in configs] == [64, 100]


class Device:
    """A device that says how much memory it has."""

    platform, device_kind = "cpu", "pretended"

    def __init__(self, limit_bytes):
        self.limit_bytes = limit_bytes

    def memory_stats(self):
        return None if self.limit_bytes is None else {"bytes_limit": self.limit_bytes, "bytes_in_use": 5}


def test_a_budget_fits_the_device(run_cli, checkpoint, configs, monkeypatch):
    def budget(limit_bytes, *options):
        monkeypatch.setattr("jax.devices", lambda *_: [Device(limit_bytes)])
        err = run_cli("generate", checkpoint, "--prompt", "short", *options)[2]
        return configs.pop().memory_bytes if "enough seen" in err else err

    whole = budget(None)
    assert budget(10 * whole) == budget(0) == whole  # 0: an allocator that does not count
    assert budget(whole // 2) == int(0.95 * (whole // 2))
    assert budget(1 << 30, "--memory", "50%") == 1 << 29
    assert budget(1 << 30, "--memory", "48MiB") == 48 << 20
    for share in ("50%", "0.4%"):
        assert f"memory {share}: a cpu does not say how much it has; give bytes" in budget(None, "--memory", share)
    assert "a share lies above 0% and up to 100%" in budget(1 << 30, "--memory", "101%")


def test_progress_counts_all_tokens_however_few_events_the_engine_keeps(run_cli, checkpoint, monkeypatch):
    seen = []

    @contextmanager
    def recorded():
        yield lambda *progress: seen.append(progress), lambda line: None

    monkeypatch.setattr(serving, "progress_bars", recorded)
    monkeypatch.setattr(engine_module, "EventLog", lambda: EventLog(kept=2))
    prompts = ("--prompt", "the rain", "--prompt", "in spain")  # as above: the same programs
    code, out, _ = run_cli("generate", checkpoint, *prompts, "--max-tokens", 40, "--json")
    assert code == 0
    counts = [len(output["token_ids"]) for output in json.loads(out)]
    assert max(counts) > 3 * ServeConfig.steps_per_call
    done = [done for stage, done, _ in seen if stage == "generate"]
    assert done == sorted(done)
    assert done[-1] == sum(counts)


def test_evaluate_measures_what_dense_code_measures(run_cli, checkpoint, hf_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    code, out, _ = run_cli("evaluate", checkpoint, "--text", text, *SIZES, "--limit", 3, "--json")
    assert code == 0
    result = json.loads(out)
    assert (result["windows"], result["window_tokens"], result["mode"]) == (3, 128, "frozen")
    assert result["mean_bits"] == result["lowest_bits"] == 6
    windows = split_windows(load_tokenizer(hf_folder)(TEXT).input_ids, 128, 3)
    weights = load_weights(hf_folder, load_config(hf_folder), np.float32, lambda line: None)
    dense = perplexity(score_dense(weights, windows)).perplexity
    assert result["perplexity"] == pytest.approx(dense, rel=0.02)
    other = perplexity(score_dense(weights, windows[:, ::-1].copy())).perplexity
    assert result["perplexity"] != pytest.approx(other, rel=0.02)


def test_evaluate_under_pressure_measures_divergence_and_saves_its_schedule(run_cli, checkpoint, hf_folder, tmp_path):
    text, schedule = tmp_path / "text.txt", tmp_path / "schedule.json"
    text.write_text(TEXT)
    options = ("--mode", "dynamic", *SIZES, "--limit", 2)
    code, out, _ = run_cli(
        "evaluate", checkpoint, "--text", text, *options, "--reference", hf_folder, "--schedule", schedule, "--json"
    )
    assert code == 0
    result = json.loads(out)
    assert (result["mode"], result["batch"], result["windows"]) == ("dynamic", 2, 2)
    assert 0 < result["kl"] < 0.02
    assert result["peak_device_bytes"] <= result["budget_bytes"]
    saved, score = read_schedule(schedule)
    assert score == result
    assert [boundary.chunks for boundary in saved.boundaries if boundary.chunks] == [2]
    assert saved.mean_bits == result["mean_bits"] == 6
    code, out, _ = run_cli("evaluate", checkpoint, "--text", text, *options, "--reference", hf_folder)
    assert code == 0
    assert f"KL {result['kl']:.5f} ± " in out


def test_a_schedule_that_cannot_be_written_costs_no_score(run_cli, checkpoint, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(TEXT)
    options = ("--text", tmp_path / "text.txt", *SIZES, "--limit", 1, "--json", "--schedule")
    with monkeypatch.context() as context:
        context.setattr(pressure, "score_under_pressure", lambda *_: 1 / 0)
        for path in (tmp_path / "nowhere" / "s.json", tmp_path):
            code, out, err = run_cli("evaluate", checkpoint, *options, path)
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert f"{path}: " in err

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(schedule_module, "write_schedule", full)
    code, out, err = run_cli("evaluate", checkpoint, *options, tmp_path / "s.json")
    assert (code, json.loads(out)["windows"]) == (2, 1)
    assert "No space left on device" in err


def test_a_score_that_cannot_be_printed_costs_no_schedule(run_cli, checkpoint, tmp_path, monkeypatch):
    def gone(*_):
        raise OSError(5, "Input/output error")

    text, schedule = tmp_path / "text.txt", tmp_path / "s.json"
    text.write_text(TEXT)
    monkeypatch.setattr(serving, "print_json", gone)
    options = ("--text", text, *SIZES, "--limit", 1, "--json", "--schedule", schedule)
    code, out, err = run_cli("evaluate", checkpoint, *options)
    assert (code, out) == (2, "")
    assert "Input/output error" in err
    assert read_schedule(schedule)[1]["windows"] == 1


def test_evaluate_refuses_the_reference_of_another_model(run_cli, checkpoint, hf_folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((hf_folder / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 256}))
    (tmp_path / "text.txt").write_text(TEXT)
    options = ("--text", tmp_path / "text.txt", "--window", 64, "--reference", other)
    code, out, err = run_cli("evaluate", checkpoint, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "not the model that the checkpoint was made of" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bits", 9], r"bits 9: the checkpoint has 6..6"),
        (["--bits", 6, "--mode", "dynamic"], "bits=6 needs mode='frozen'"),
        (["--window", 4096], "the text has 540 tokens, a window takes 4096"),
        (["--window", 520], "max_model_len 520 exceeds the model's context of 512 tokens"),
        (["--memory", "100KiB"], "a budget of 100 KiB is too small"),
        (["--implementation", "triton"], "implementation triton cannot run: it needs an NVIDIA GPU, the device is cpu"),
    ],
)
def test_evaluate_refuses_in_one_line(run_cli, checkpoint, tmp_path, options, message):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    code, out, err = run_cli("evaluate", checkpoint, "--text", text, "--window", 64, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
