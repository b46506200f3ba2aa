# SPDX-License-Identifier: Apache-2.0
"""What the ablation and the uniform curve compute from their scores, and one score from a checkpoint to its record."""

import json
import shutil
from dataclasses import replace

import ablation
import numpy as np
import policy_search
import pressure_cases as pc
import pytest
import uniform_curve

from pagedweight_jax.cli import main
from pagedweight_jax.config import PlannerConfig
from pagedweight_jax.evaluate.schedule import read_schedule
from pagedweight_jax.planning.policy import Policy


def test_equal_quality_is_read_off_between_points_on_a_log_scale():
    curve = {1000: {"kl": 0.1}, 2000: {"kl": 0.01}, 3000: {"kl": 0.001}}
    assert uniform_curve.bytes_at(curve, "kl", 0.01) == 2000
    assert uniform_curve.bytes_at(curve, "kl", 10**-1.5) == pytest.approx(1500, abs=1)
    assert uniform_curve.bytes_at(curve, "kl", 0.5) == 1000  # no more was tried
    assert uniform_curve.bytes_at(curve, "kl", 0.0001) is None


def test_saved_bits_count_the_luts_that_a_static_server_needs(tmp_path):
    width = uniform_curve.Width(checkpoint=tmp_path, bits=4, own_bytes=1700, all_bytes=1900)
    curve = {1000: {"kl": 0.1, "perplexity": 30.0}, 2000: {"kl": 0.01, "perplexity": 20.0}}
    line = uniform_curve.saved_line(width, {"kl": 10**-1.5, "perplexity": 40.0}, curve, 800, "paged")
    assert "equal kl: 2.00 bits saved a weight (own LUT), 4.00 (all LUTs)" in line
    assert "equal perplexity: >= 7.00" in line


def record(label, text, kl, memory_bytes=1 << 20):
    return {
        "label": label,
        "text": text,
        "memory_bytes": memory_bytes,
        "kl": kl,
        "kl_windows": [kl],
        "perplexity": 20.0,
        "mean_bits": 4.0,
    }


def test_the_ablation_table_compares_with_the_full_system(tmp_path):
    records = [record(label, text, 0.02 + 0.001 * i) for i, label in enumerate(ablation.ROWS) for text in ("a", "b")]
    lines = ablation.table(records, {1 << 20: 4.0}).splitlines()
    assert len([line for line in lines if line.startswith("| with")]) == len(ablation.ROWS) - 2
    (moved,) = [line for line in lines if line.startswith("| without page movement")]
    place = list(ablation.ROWS).index("without page movement")
    assert moved.endswith(f"| {20 + place:.2f} | +{100 * place / 20:.1f} ± 0.0 % |")
    ablation.draw(tmp_path / "bars.png", records, {1 << 20: 4.0})
    assert (tmp_path / "bars.png").stat().st_size > 5000


def test_texts_are_named_on_the_command_line():
    one, other = pc.texts(["a=x.txt", "b=y.txt@3"], windows=2, window_tokens=16)
    assert (one.name, one.path.name, one.skip) == ("a", "x.txt", 0)
    assert (other.name, other.path.name, other.skip, other.windows) == ("b", "y.txt", 3, 2)


def test_policies_are_compared_window_by_window_and_no_case_is_scored_twice(tmp_path):
    """The dearer policy costs 10 % more in a text's first window and 30 % more in its second, at both targets."""
    scored = []

    def run(function, cases, model, cache):
        scored.extend(cases)
        for case in cases:
            kl_W = case.memory_bytes * np.array([1.0, 1.0]) * (np.array([1.1, 1.3]) if case.policy.alpha else 1.0)
            yield {"kl": kl_W.mean(), "kl_windows": kl_W.tolist()}

    texts = tuple(pc.texts(["a=x.txt", "b=y.txt"], windows=2, window_tokens=16))
    rows = policy_search.Rows(run, tmp_path, tmp_path)
    scorer = policy_search.Scorer(tmp_path, texts, (1, 2), 2, rows)
    plain, dear = Policy(alpha=0.0), Policy(alpha=1.0)
    np.testing.assert_allclose(list(scorer.many([plain, dear])), [[1, 2], [1.2, 2.4]])
    assert len(scored) == 8
    found = policy_search.compare(scorer, plain, dear)
    assert len(scored) == 8
    assert found["a"] == {"windows": 2, "relative": 1.2, "standard_error": 0.1}
    assert found["all"] == {"windows": 4, "relative": 1.2, "standard_error": round(0.2 / 12**0.5, 5)}


def test_a_score_from_the_checkpoint_to_its_record(hf_folder, tmp_path, capsys):
    checkpoint = tmp_path / "paged"
    assert main(["convert", str(hf_folder), str(checkpoint), "--bits", "3..6", "--samples", "8",
                 "--sequence-length", "64"]) == 0  # fmt: skip
    text = pc.Text(name="letters", path=hf_folder / "text" / "calibration.txt", windows=4, window_tokens=256)
    tight_bytes, ample_bytes = (pc.full_context_bytes(checkpoint, 4, 256, bits) for bits in (3.5, 6))
    assert tight_bytes < ample_bytes
    assert pc.unquantized(text, hf_folder, tmp_path / "cache")["windows"] == 4
    planner = PlannerConfig(low_watermark_blocks=0, high_watermark_blocks=0, hysteresis_boundaries=1)
    ample = pc.Case(
        label="paged", checkpoint=checkpoint, text=text, batch=4, memory_bytes=ample_bytes, planner=planner
    )
    rows = {}
    for name, case in {
        "ample": ample,
        "tight": replace(ample, memory_bytes=tight_bytes),
        "frozen": replace(ample, memory_bytes=tight_bytes, mode="frozen"),
        "uniform": replace(ample, mode="frozen", bits=3),
    }.items():
        case = replace(case, label=name)
        rows[name] = pc.record(case, hf_folder, tmp_path / "cache", tmp_path / "schedules")
        assert json.loads(json.dumps(rows[name])) == rows[name]
        assert rows[name]["memory_bytes"] == case.memory_bytes
        assert len(rows[name]["kl_windows"]) == 4
        assert np.mean(rows[name]["kl_windows"]) == pytest.approx(rows[name]["kl"], rel=1e-4)
    assert rows["ample"]["lowest_bits"] > 5.5  # the low watermark keeps a block
    assert rows["uniform"]["mean_bits"] == 3
    assert 3 <= rows["frozen"]["mean_bits"] <= rows["tight"]["mean_bits"] < rows["ample"]["mean_bits"]
    assert rows["ample"]["kl"] < rows["tight"]["kl"] < rows["uniform"]["kl"]
    assert rows["tight"]["peak_device_bytes"] <= tight_bytes
    saved = tmp_path / "schedules" / f"letters-4-{tight_bytes}-tight.json"
    schedule, score = read_schedule(saved)
    assert score == rows["tight"]
    assert schedule.mean_bits == pytest.approx(rows["tight"]["mean_bits"], abs=1e-3)


def test_what_is_remembered_of_a_text_is_of_its_tokens_and_of_the_model(hf_folder, tmp_path):
    """Not of its name: two files may be called the same, and one file may change."""
    other_model = shutil.copytree(hf_folder, tmp_path / "other")
    config = json.loads((other_model / "config.json").read_text())
    (other_model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    (tmp_path / "a.txt").write_text("the rain in spain " * 8)
    (tmp_path / "b.txt").write_text("stays mainly in the plain " * 8)

    def remembered(path, model=hf_folder):
        return pc._cached(pc.Text(name="text", path=tmp_path / path, windows=2, window_tokens=32), model, tmp_path)

    places = {remembered("a.txt"), remembered("b.txt"), remembered("a.txt", other_model)}
    assert len(places) == 3
    shutil.copy(tmp_path / "a.txt", tmp_path / "c.txt")
    assert remembered("c.txt") == remembered("a.txt")
