# SPDX-License-Identifier: Apache-2.0
"""A tiny paged checkpoint of random pages, written once."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.checkpoint.dense import named_leaves
from pagedweight_jax.checkpoint.draft import save
from pagedweight_jax.checkpoint.layout import choose_frame_bytes
from pagedweight_jax.checkpoint.manifest import CalibrationRun, PagedManifest, page_name
from pagedweight_jax.config import KINDS
from pagedweight_jax.models.weights import without_experts
from pallas_kernels.bitplane import pack_page

MIN_BITS, MAX_BITS = 2, 4


def make_manifest(config):
    return PagedManifest(
        config=config,
        min_bits=MIN_BITS,
        max_bits=MAX_BITS,
        frame_bytes=choose_frame_bytes(config, MIN_BITS, MAX_BITS),
        calibration=CalibrationRun(
            text_sha256="0" * 64, samples=1, sequence_length=8, seed=0, min_tokens=1, uncalibrated_experts=0
        ),
        versions={"pagedweight-jax": "0.1.0"},
    )


def make_groups(manifest, dense):
    """Every array of a checkpoint, random but for the dense weights, group by group."""
    rng = np.random.default_rng(0)
    config = manifest.config
    num_layers, num_experts = config.num_sparse_layers, config.num_experts
    for layer in range(num_layers):
        group = {}
        for kind, layout in enumerate(manifest.layouts()):
            codes_ENC = rng.integers(0, 2**MAX_BITS, (num_experts, layout.rows, layout.columns), dtype=np.uint8)
            for page in range(MAX_BITS):
                lut_ENK = rng.standard_normal((num_experts, layout.rows, 2 ** (page + 1))).astype(np.float16)
                group[page_name(layer, kind, page)] = pack_page(codes_ENC, lut_ENK, page, layout)
        yield group
    yield {f"dense/{name}": np.asarray(leaf) for name, leaf in named_leaves(dense).items()}
    yield {
        "calibration/sensitivity": rng.random((num_layers, num_experts, 2, MAX_BITS - MIN_BITS + 1)),
        "calibration/uncalibrated": rng.random((num_layers, num_experts)) < 0.5,
        "calibration/tokens": rng.integers(0, 1000, (num_layers, num_experts)),
        **{
            f"calibration/importance/{name}": rng.random(
                (num_layers, num_experts, config.block_shape(kind)[1]), np.float32
            )
            for kind, name in enumerate(KINDS)
        },
    }


@pytest.fixture(scope="session")
def dense(tiny_weights):
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16), without_experts(tiny_weights))


@pytest.fixture(scope="session")
def manifest(tiny_config):
    return make_manifest(tiny_config())


@pytest.fixture(scope="session")
def groups(manifest, dense):
    """What ``save`` takes: every array by name, group by group."""
    return list(make_groups(manifest, dense))


@pytest.fixture(scope="session")
def arrays(groups):
    return {name: array for group in groups for name, array in group.items()}


@pytest.fixture(scope="session")
def source_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    (folder / "config.json").write_text("{}")
    (folder / "calibration.txt").write_text("once upon a time")
    return {"config.json": folder / "config.json", "text/calibration.txt": folder / "calibration.txt"}


@pytest.fixture(scope="session")
def written(tmp_path_factory, manifest, groups, source_files):
    """A finished checkpoint; tests that damage it take ``copy``."""
    out = tmp_path_factory.mktemp("paged") / "tiny"
    save(out, manifest, groups, source_files)
    return out


@pytest.fixture
def copy(written, tmp_path):
    """A checkpoint that a test may break."""
    return shutil.copytree(written, tmp_path / "tiny")
