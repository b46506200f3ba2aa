# SPDX-License-Identifier: Apache-2.0
"""policy.json comes back as it was written, is held to its checkpoint, and appears all at once."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from pagedweight_jax.checkpoint.paged import open_checkpoint, verify
from pagedweight_jax.checkpoint.policy import (
    POLICY,
    OnlinePolicy,
    PolicyRun,
    load_calibration,
    read_policy,
    write_policy,
)
from pagedweight_jax.errors import UserError
from pagedweight_jax.planning.calibration import ResidualHeads
from pagedweight_jax.planning.damage import global_damage
from pagedweight_jax.planning.pins import Pin, pinned_bits
from pagedweight_jax.planning.policy import Policy


@pytest.fixture
def checkpoint(copy):
    return open_checkpoint(copy)


def make_policy(checkpoint, **changes):
    rng = np.random.default_rng(1)
    L, E, U, Q = checkpoint.sensitivity.shape
    mass_LE = rng.random((L, E))
    features_LEUX = rng.random((L, E, U, 3)) * 1e-7
    features_LEUX[0, 1, 0] = np.nan
    fields = {
        "run": PolicyRun(text_sha256="ab" * 32, samples=3, sequence_length=8, seed=1),
        "damage_LEUR": rng.random((L, E, U, Q - 1)) / 3,
        "mass_LE": mass_LE / mass_LE.sum(-1, keepdims=True),
        "features_LEUX": features_LEUX,
        "heads": ResidualHeads(
            weight_URX=rng.standard_normal((U, Q - 1, 6)),
            intercept_UR=rng.standard_normal((U, Q - 1)),
            confidence_UR=rng.random((U, Q - 1)),
            low_UR=-rng.random((U, Q - 1)),
            high_UR=rng.random((U, Q - 1)),
        ),
        "policy": Policy(
            edges=(0.5, 2.0),
            multipliers=(0.3, 1.0, 3.0),
            floors=(0, 2, 3),
            depth_caps=(None, 2, 1),
            stages=(0, 1),
            alpha=0.7,
            half_life_tokens=100.0,
            prior_tokens=64.0,
        ),
        "fit": {"same": {"r2": 0.5, "names": ["a", "b"]}},
        "pins": (Pin(layer=0, bits=3), Pin(expert=1, bits=4)),
    } | changes
    return OnlinePolicy(**fields)


def assert_same(one, other):
    for field in dataclasses.fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, np.ndarray):
            np.testing.assert_array_equal(mine, theirs, strict=True)
        elif isinstance(mine, ResidualHeads):
            assert_same(mine, theirs)
        else:
            assert mine == theirs


def test_a_policy_comes_back_as_it_was(checkpoint):
    online = make_policy(checkpoint)
    assert read_policy(checkpoint) is None
    path = write_policy(checkpoint, online)
    assert path == checkpoint.path / POLICY
    assert_same(online, read_policy(checkpoint))
    first = path.read_bytes()
    write_policy(checkpoint, online)
    assert path.read_bytes() == first
    assert verify(checkpoint.path) == []


def test_the_planner_gets_all_of_it(checkpoint):
    without = load_calibration(checkpoint)
    np.testing.assert_array_equal(without.sensitivity_LEUQ, checkpoint.sensitivity)
    assert without.heads is without.mass_LE is without.features_LEUX is None
    assert without.policy == Policy()

    online = make_policy(checkpoint)
    write_policy(checkpoint, online)
    calibration = load_calibration(checkpoint)
    np.testing.assert_allclose(global_damage(calibration.sensitivity_LEUQ), online.damage_LEUR, rtol=1e-12)
    np.testing.assert_array_equal(calibration.sensitivity_LEUQ[..., -1], checkpoint.sensitivity[..., -1])
    assert (calibration.min_bits, calibration.max_bits) == (checkpoint.manifest.min_bits, checkpoint.manifest.max_bits)
    np.testing.assert_array_equal(calibration.mass_LE, online.mass_LE)
    assert calibration.policy == online.policy
    min_bits, max_bits = checkpoint.manifest.min_bits, checkpoint.manifest.max_bits
    least_LEU = pinned_bits(online.pins, calibration.sensitivity_LEUQ.shape[:-1], min_bits, max_bits)
    np.testing.assert_array_equal(calibration.pinned_LEU, least_LEU)
    assert (calibration.pinned_LEU > min_bits).any()


def test_a_policy_without_pins_pins_nothing(checkpoint):
    path = write_policy(checkpoint, make_policy(checkpoint, pins=()))
    assert load_calibration(checkpoint).pinned_LEU is None
    content = json.loads(path.read_text())
    assert content["pins"] == []



def test_a_foreign_policy_is_refused(checkpoint, tmp_path):
    write_policy(checkpoint, make_policy(checkpoint))
    other = shutil.copytree(checkpoint.path, tmp_path / "other")
    manifest = (other / "manifest.json").read_text()
    assert '"seed": 0' in manifest
    (other / "manifest.json").write_text(manifest.replace('"seed": 0', '"seed": 7'))
    with pytest.raises(UserError, match=r"other/policy.json: made for another checkpoint, its manifest.json is not"):
        read_policy(dataclasses.replace(checkpoint, path=other))


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: "", "cannot be read"),
        (lambda text: "[]", "not a pagedweight policy"),
        (lambda text: text.replace('"alpha": 0.7', '"alpha": 0.8'), "damaged or edited"),
        (lambda text: json.dumps(json.loads(text) | {"format_version": 99}), "format_version 99, this version reads 2"),
    ],
)
def test_a_damaged_policy_is_refused(checkpoint, edit, problem):
    path = write_policy(checkpoint, make_policy(checkpoint))
    text = path.read_text()
    assert edit(text) != text
    path.write_text(edit(text))
    with pytest.raises(UserError, match=rf"policy.json: {problem}.*run pagedweight calibrate again$"):
        load_calibration(checkpoint)


def test_what_does_not_fit_the_checkpoint_is_not_written(checkpoint):
    online = make_policy(checkpoint)
    write_policy(checkpoint, online)
    before = (checkpoint.path / POLICY).read_bytes()
    for changes in (
        {"mass_LE": online.mass_LE[:, :-1]},
        {"damage_LEUR": online.damage_LEUR[:1]},
        {"damage_LEUR": -online.damage_LEUR},
        {"features_LEUX": online.features_LEUX[..., :2]},
    ):
        with pytest.raises(UserError):
            write_policy(checkpoint, make_policy(checkpoint, **changes))
    assert (checkpoint.path / POLICY).read_bytes() == before


def test_a_write_that_fails_leaves_the_old_policy(checkpoint, monkeypatch):
    write_policy(checkpoint, make_policy(checkpoint))
    before = sorted(path.name for path in checkpoint.path.iterdir()), (checkpoint.path / POLICY).read_bytes()

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pagedweight_jax.checkpoint.policy.sync", full)
    with pytest.raises(OSError, match="No space left"):
        write_policy(checkpoint, make_policy(checkpoint, fit={}))
    assert (sorted(path.name for path in checkpoint.path.iterdir()), (checkpoint.path / POLICY).read_bytes()) == before
