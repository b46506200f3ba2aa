# SPDX-License-Identifier: Apache-2.0
"""A tiny paged checkpoint of random pages and a tiny Hugging Face folder, each written once."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pagedweight_jax.checkpoint.dense import named_leaves
from pagedweight_jax.checkpoint.draft import save
from pagedweight_jax.checkpoint.hf import load_config, load_weights
from pagedweight_jax.checkpoint.layout import choose_frame_bytes
from pagedweight_jax.checkpoint.manifest import CalibrationRun, PagedManifest, page_name
from pagedweight_jax.config import KINDS
from pagedweight_jax.errors import UserError
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


@pytest.fixture(scope="session")
def saved(save_hf, tmp_path_factory):
    """A folder with one file, one with shards, both with a dense layer between sparse ones, and the tensors in them."""
    root = tmp_path_factory.mktemp("saved")
    mixed = {"num_hidden_layers": 3, "mlp_only_layers": [1]}
    save_hf(root / "single", **mixed)
    save_hf(root / "sharded", max_shard_size="50KB", **mixed)
    return root, load_file(root / "single" / "model.safetensors")


@pytest.fixture
def single(saved, tmp_path):
    return shutil.copytree(saved[0] / "single", tmp_path / "single")


@pytest.fixture
def sharded(saved, tmp_path):
    return shutil.copytree(saved[0] / "sharded", tmp_path / "sharded")


@pytest.fixture(scope="session")
def edit():
    """The function ``edit(path, change)``: rewrites a safetensors file with ``change(tensors)`` applied in place."""

    def rewrite(path, change):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return rewrite


@pytest.fixture(scope="session")
def edit_json():
    """The same for a JSON file."""

    def rewrite(path, change):
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))

    return rewrite


@pytest.fixture(scope="session")
def error_of():
    """The function ``error_of(folder)``: the one line with which it is refused."""

    def line(folder):
        with pytest.raises(UserError) as error:
            load_weights(folder, load_config(folder), jnp.float32)
        message = str(error.value)
        assert "\n" not in message
        return message

    return line
