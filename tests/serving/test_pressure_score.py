# SPDX-License-Identifier: Apache-2.0
"""Scoring under pressure, through a real engine on a tiny checkpoint."""

from dataclasses import replace

import numpy as np
import pytest

from pagedweight_jax.checkpoint.policy import load_calibration
from pagedweight_jax.config import PlannerConfig, ServeConfig
from pagedweight_jax.evaluate.divergence import divergence, reference
from pagedweight_jax.evaluate.perplexity import score_dense
from pagedweight_jax.evaluate.pressure import score_under_pressure
from pagedweight_jax.paging.arena import KV
from pagedweight_jax.serving.engine import Engine
from pagedweight_jax.serving.events import KEPT_EVENTS, EventLog

ROWS, WINDOW_TOKENS, CHUNK_TOKENS = 4, 96, 16
SPARE_BLOCKS = 6
CONFIG = ServeConfig(
    memory_bytes=8 << 20,
    max_num_seqs=ROWS,
    max_model_len=WINDOW_TOKENS,
    prefill_chunk_tokens=CHUNK_TOKENS,
    steps_per_call=4,
    dtype="float32",
    kv_dtype="float32",
    planner=PlannerConfig(low_watermark_blocks=0, high_watermark_blocks=1, hysteresis_boundaries=1),
)


@pytest.fixture(scope="module")
def windows():
    return np.random.default_rng(3).integers(1, 128, (2 * ROWS, WINDOW_TOKENS)).astype(np.int32)


@pytest.fixture(scope="module")
def references(tiny, windows):
    """The weights at 6 bits stand for the unquantized model."""
    return reference(tiny.dequantized(np.full((2, 4, 2), 6)), windows)


def score(tiny, windows, references, squeezed=False, calibration=None, kept=KEPT_EVENTS, **changes):
    """Scores with an engine of its own; a squeezed one has room for few KV blocks beside its first bits."""
    engine = Engine(tiny.checkpoint, replace(CONFIG, **changes), calibration=calibration)
    engine.events = EventLog(kept)
    try:
        spare_frames = SPARE_BLOCKS * engine.state.geometry.frames_per_block
        held = engine.allocator.take(engine.allocator.num_free - spare_frames if squeezed else 0, KV)
        result = score_under_pressure(engine, windows, references)
        engine.allocator.give(held)
        engine.check_invariants()
    finally:
        engine.close()
    return result


@pytest.fixture(scope="module")
def dynamic(tiny, windows, references):
    return score(tiny, windows, references, squeezed=True)


def test_every_row_advances_a_chunk_per_boundary_within_the_budget(dynamic):
    boundaries = dynamic.schedule.boundaries
    assert [b.chunks for b in boundaries if b.chunks] == [ROWS] * (2 * WINDOW_TOKENS // CHUNK_TOKENS)
    assert max(b.device_bytes for b in boundaries) <= dynamic.schedule.budget_bytes == CONFIG.memory_bytes
    assert dynamic.kl_WT.shape == dynamic.logprobs_WT.shape == (2 * ROWS, WINDOW_TOKENS - 1)


def test_bits_give_way_and_are_back_for_the_next_windows(dynamic):
    bits_BLEU = dynamic.schedule.bits()
    scored = [i for i, b in enumerate(dynamic.schedule.boundaries) if b.chunks]
    first, last, again = scored[0], scored[len(scored) // 2 - 1], scored[len(scored) // 2]
    assert bits_BLEU[last].mean() < bits_BLEU[first].mean() - 0.5
    assert bits_BLEU[again].mean() == pytest.approx(bits_BLEU[first].mean(), abs=0.25)
    assert dynamic.schedule.lowest_bits < dynamic.schedule.mean_bits < dynamic.schedule.boundaries[first].mean_bits


def test_pinned_experts_keep_their_bits_under_pressure(tiny, windows, dynamic):
    pinned_LEU = np.full((2, 4, 2), 3, np.uint8)
    pinned_LEU[0, :2] = 6
    calibration = replace(load_calibration(tiny.checkpoint), pinned_LEU=pinned_LEU)
    result = score(tiny, windows, None, squeezed=True, calibration=calibration)
    pinned = (slice(None), 0, slice(2))
    assert result.schedule.bits()[pinned].min() == 6
    assert dynamic.schedule.bits()[pinned].min() < 6
    assert result.schedule.bits().min() < 6  # the others gave way instead


def test_a_frozen_score_is_that_of_the_same_weights_without_pages(tiny, windows, references, dynamic):
    frozen = score(tiny, windows, references, mode="frozen", bits=3)
    bits_LEU = frozen.schedule.initial_LEU
    assert (frozen.schedule.bits() == bits_LEU).all()
    assert (bits_LEU == 3).all()
    weights = tiny.dequantized(bits_LEU)
    np.testing.assert_allclose(frozen.logprobs_WT, score_dense(weights, windows), atol=2e-4)
    hidden_WTD = reference(weights, windows).hidden_WTD
    for window in range(len(windows)):
        expected_T = divergence(references, window, weights, hidden_WTD[window])
        np.testing.assert_allclose(frozen.kl_WT[window], expected_T, atol=2e-4)
    assert frozen.kl > 0.01
    assert frozen.kl_standard_error > 0
    assert dynamic.kl < 0.9 * frozen.kl  # its bits were higher throughout


def test_a_schedule_is_whole_however_few_events_the_engine_keeps(tiny, windows):
    schedule = score(tiny, windows, None, squeezed=True, kept=2).schedule
    assert [b.chunks for b in schedule.boundaries if b.chunks] == [ROWS] * (2 * WINDOW_TOKENS // CHUNK_TOKENS)
    assert schedule.lowest_bits < schedule.mean_bits < schedule.boundaries[0].mean_bits
    assert len(schedule.bits()) == len(schedule.boundaries) > 2  # and every change begins where the last one ended


def test_six_bits_are_their_own_reference(tiny, windows, references):
    ample = score(tiny, windows[:ROWS], replace(references, hidden_WTD=references.hidden_WTD[:ROWS]))
    assert ample.schedule.mean_bits == ample.schedule.lowest_bits == 6
    assert np.abs(ample.kl_WT).max() < 1e-5


def test_without_a_reference_there_is_no_divergence(tiny, windows):
    result = score(tiny, windows[:1], None)
    assert result.kl is result.kl_WT is result.kl_standard_error is None
    assert result.perplexity.windows == 1


def test_a_reference_of_other_windows_is_refused(tiny, windows, references):
    with pytest.raises(ValueError, match="is not of windows"):
        score(tiny, windows[:3], references)


def test_scores_repeat_bit_by_bit(tiny, windows, references, dynamic):
    again = score(tiny, windows[:ROWS], replace(references, hidden_WTD=references.hidden_WTD[:ROWS]), squeezed=True)
    np.testing.assert_array_equal(again.kl_WT, dynamic.kl_WT[:ROWS])
    np.testing.assert_array_equal(again.logprobs_WT, dynamic.logprobs_WT[:ROWS])
