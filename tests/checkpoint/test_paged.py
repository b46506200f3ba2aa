# SPDX-License-Identifier: Apache-2.0
"""A paged checkpoint comes back bit for bit, or not at all: every kind of damage is one UserError that names it."""

import dataclasses
import hashlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.checkpoint.dense import named_leaves
from pagedweight_jax.checkpoint.layout import choose_frame_bytes, layouts, padding
from pagedweight_jax.checkpoint.manifest import CalibrationRun, PagedManifest, from_json, page_name
from pagedweight_jax.checkpoint.paged import PagedCheckpoint, open_checkpoint, save, verify
from pagedweight_jax.config import DOWN, GATE_UP, KINDS
from pagedweight_jax.errors import UserError
from pagedweight_jax.models.weights import cast, without_experts
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


@pytest.fixture(scope="module")
def dense(tiny_weights):
    return cast(without_experts(tiny_weights), jnp.bfloat16)


@pytest.fixture(scope="module")
def manifest(tiny_config):
    return make_manifest(tiny_config())


@pytest.fixture(scope="module")
def source_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    (folder / "config.json").write_text("{}")
    (folder / "calibration.txt").write_text("once upon a time")
    return {"config.json": folder / "config.json", "text/calibration.txt": folder / "calibration.txt"}


@pytest.fixture(scope="module")
def written(tmp_path_factory, manifest, dense, source_files):
    """A finished checkpoint; tests that damage it take ``copy``."""
    out = tmp_path_factory.mktemp("paged") / "tiny"
    save(out, manifest, make_groups(manifest, dense), source_files)
    return out


@pytest.fixture
def copy(written, tmp_path):
    return shutil.copytree(written, tmp_path / "tiny")


def arrays_of(manifest, dense):
    return {name: array for group in make_groups(manifest, dense) for name, array in group.items()}


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_was_written_comes_back(written, manifest, dense):
    checkpoint = open_checkpoint(written)
    arrays = arrays_of(manifest, dense)
    assert set(checkpoint.manifest.arrays) == set(arrays)
    for layer in range(manifest.config.num_sparse_layers):
        for kind in (GATE_UP, DOWN):
            for page in range(MAX_BITS):
                pages = checkpoint.load_pages(layer, kind, page)
                assert pages.dtype == np.uint32
                np.testing.assert_array_equal(pages, arrays[page_name(layer, kind, page)])
    np.testing.assert_array_equal(checkpoint.sensitivity, arrays["calibration/sensitivity"], strict=True)
    np.testing.assert_array_equal(checkpoint.tokens, arrays["calibration/tokens"], strict=True)
    np.testing.assert_array_equal(checkpoint.uncalibrated, arrays["calibration/uncalibrated"], strict=True)
    np.testing.assert_array_equal(checkpoint.importance(DOWN), arrays["calibration/importance/down"], strict=True)
    assert dataclasses.replace(checkpoint.manifest, arrays={}) == manifest
    assert verify(written) == []


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_dense_weights_come_back(written, dense, dtype):
    loaded = open_checkpoint(written).load_dense(dtype)
    expected = dense if dtype is None else cast(dense, dtype)
    assert jax.tree.structure(loaded) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected)):
        assert mine.dtype == theirs.dtype
        assert jnp.array_equal(mine, theirs)


def test_two_writes_give_equal_manifests(written, manifest, dense, source_files, tmp_path):
    save(tmp_path / "again", manifest, make_groups(manifest, dense), source_files)
    text = (written / "manifest.json").read_text()
    assert (tmp_path / "again" / "manifest.json").read_text() == text
    assert str(tmp_path.parent) not in text
    assert "time" not in json.loads(text)


def test_files_are_listed_as_sha256sum_reads_them(written):
    lines = (written / "files.sha256").read_text().splitlines()
    listed = dict(reversed(line.split("  ")) for line in lines)
    assert set(listed) == {str(name) for name in contents(written)} - {"files.sha256"}
    assert {"config.json", "manifest.json", "text/calibration.txt"} < set(listed)
    for name, digest in listed.items():
        assert hashlib.sha256((written / name).read_bytes()).hexdigest() == digest


# ---- atomicity ----


def test_an_existing_folder_is_refused(copy, manifest, dense, source_files):
    before = contents(copy)
    with pytest.raises(UserError, match="exists already"):
        save(copy, manifest, make_groups(manifest, dense), source_files)
    assert contents(copy) == before


def test_overwrite_replaces_a_checkpoint_and_nothing_else(copy, manifest, dense, source_files, tmp_path):
    (copy / "stray").write_text("of the old one")
    (tmp_path / "tiny.replaced" / "arrays").mkdir(parents=True)  # of an overwrite that died
    save(copy, manifest, make_groups(manifest, dense), source_files, overwrite=True)
    assert not (copy / "stray").exists()
    assert verify(copy) == []
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]

    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not a paged checkpoint"):
        save(tmp_path / "precious", manifest, make_groups(manifest, dense), source_files, overwrite=True)
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "years of work"


def test_a_write_that_fails_leaves_nothing(manifest, dense, source_files, tmp_path):
    def failing():
        yield next(make_groups(manifest, dense))
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        save(tmp_path / "out", manifest, failing(), source_files)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_overwrite_keeps_the_old_checkpoint(copy, manifest, source_files):
    def failing():
        raise RuntimeError("power cut")
        yield

    with pytest.raises(RuntimeError, match="power cut"):
        save(copy, manifest, failing(), source_files, overwrite=True)
    assert verify(copy) == []


def test_the_leftover_of_a_crash_is_no_checkpoint_and_is_replaced(written, manifest, dense, source_files, tmp_path):
    out, leftover = tmp_path / "out", tmp_path / "out.partial"
    shutil.copytree(written / "arrays", leftover / "arrays")
    (leftover / "stray").write_text("of the crash")
    with pytest.raises(UserError, match=r"no such folder \(out\.partial is of a conversion that did not finish\)"):
        open_checkpoint(out)
    with pytest.raises(UserError, match=r"no manifest\.json, so not a finished"):
        open_checkpoint(leftover)
    save(out, manifest, make_groups(manifest, dense), source_files)
    assert verify(out) == []
    assert not leftover.exists()
    assert not (out / "stray").exists()


def test_arrays_that_do_not_fit_the_model_are_not_written(manifest, dense, source_files, tmp_path):
    groups = list(make_groups(manifest, dense))
    groups[0]["pages/0/down/1"] = groups[0]["pages/0/down/1"][:-1]
    with pytest.raises(UserError, match="array pages/0/down/1 is uint32"):
        save(tmp_path / "out", manifest, groups, source_files)
    assert list(tmp_path.iterdir()) == []


# ---- damage ----


def largest_file(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip_bit(path, position, bit=0):
    octets = bytearray(path.read_bytes())
    octets[position] ^= 1 << bit
    path.write_bytes(octets)


def damage(folder):
    """(arrays, files) that ``verify`` names; the arrays must be refused by load, too, and all others be loaded."""
    problems = verify(folder)
    manifest = from_json((folder / "manifest.json").read_text())
    arrays = [name for name in manifest.arrays if any(f"array {name} is damaged" in p for p in problems)]
    files = [p.split(":")[0] for p in problems if "damaged or edited" in p or p.endswith(": missing")]
    assert len(arrays) + len(files) == len(problems)
    checkpoint = PagedCheckpoint(folder, manifest)
    for name in manifest.arrays:
        if name in arrays:
            with pytest.raises(UserError, match=f"array {name} is damaged"):
                checkpoint.load(name)
        else:
            checkpoint.load(name)
    return arrays, files


def test_an_undamaged_copy_verifies(copy):
    assert damage(copy) == ([], [])


@pytest.mark.parametrize("group", ["pages/0", "pages/1", "dense", "calibration"])
def test_a_flipped_bit_in_the_data_is_found(copy, group):
    """In the largest data file: somewhere in the arrays' compressed words."""
    path = largest_file(copy / "arrays" / group)
    flip_bit(path, path.stat().st_size // 4, bit=3)
    arrays, files = damage(copy)
    assert files == [str(path)]
    assert len(arrays) >= 1
    assert all(name.startswith(f"{group}/") for name in arrays)


def test_bits_that_decode_without_an_error_are_found_by_their_checksum(copy, manifest, dense):
    """Orbax reads this array gladly: only the checksum knows that it is another one."""
    from orbax.checkpoint.experimental import v1 as ocp

    group = next(make_groups(manifest, dense))
    group["pages/0/gate_up/2"][1, 0, 5] ^= 1 << 17
    shutil.rmtree(copy / "arrays" / "pages" / "0")
    ocp.save(copy / "arrays" / "pages" / "0", group)
    checkpoint = PagedCheckpoint(copy, from_json((copy / "manifest.json").read_text()))
    with pytest.raises(UserError, match=r"pages/0/gate_up/2 .* checksum"):
        checkpoint.load_pages(0, GATE_UP, 2)
    checkpoint.load_pages(0, GATE_UP, 1)


def test_no_flipped_bit_anywhere_gives_other_arrays(written, copy, manifest, dense):
    """Any file, any place: the array is refused, or it is still the one that was written."""
    rng = np.random.default_rng(1)
    arrays = arrays_of(manifest, dense)
    folder = copy / "arrays" / "calibration"
    found = 0
    for path in [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]:
        intact = path.read_bytes()
        for position in rng.integers(0, len(intact), 4):
            flip_bit(path, position, int(rng.integers(8)))
            checkpoint = open_checkpoint(copy)
            for name in [name for name in arrays if name.startswith("calibration/")]:
                try:
                    np.testing.assert_array_equal(checkpoint.load(name), arrays[name], strict=True)
                except UserError:
                    found += 1
            path.write_bytes(intact)
    assert found > 10
    assert verify(copy) == []


@pytest.mark.parametrize("how", ["truncate", "empty", "remove"])
def test_a_short_or_missing_data_file_is_found(copy, how):
    path = largest_file(copy / "arrays" / "dense")
    if how == "remove":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 0 if how == "empty" else path.stat().st_size // 4])
    arrays, files = damage(copy)
    assert files == [str(path)]
    assert len(arrays) >= 1
    if how == "remove":
        with pytest.raises(UserError, match=f"{path.name}: missing"):
            open_checkpoint(copy)
    else:
        with pytest.raises(UserError, match=f"{path.name}: damaged"):
            open_checkpoint(copy).load_dense()


def test_a_missing_array_folder_is_found(copy):
    shutil.rmtree(copy / "arrays" / "pages" / "1")
    with pytest.raises(UserError, match=r"arrays/pages/1/\S+: missing"):
        open_checkpoint(copy)
    arrays, _ = damage(copy)
    assert len(arrays) == 2 * MAX_BITS


@pytest.mark.parametrize("how", ["flip", "remove"])
@pytest.mark.parametrize("name", ["config.json", "text/calibration.txt"])
def test_a_damaged_or_missing_file_is_found(copy, name, how):
    if how == "flip":
        flip_bit(copy / name, 1)
    else:
        (copy / name).unlink()
    match = f"{name}: {'damaged' if how == 'flip' else 'missing'}"
    with pytest.raises(UserError, match=match):
        open_checkpoint(copy)
    (problem,) = verify(copy)
    assert match in problem


def test_a_missing_or_empty_list_of_checksums_is_found(copy):
    (copy / "files.sha256").write_text("")
    with pytest.raises(UserError, match=r"files\.sha256: does not list manifest\.json"):
        open_checkpoint(copy)
    (copy / "files.sha256").unlink()
    with pytest.raises(UserError, match=r"files\.sha256: cannot be read"):
        open_checkpoint(copy)


# ---- manifests ----


def edit(folder, change):
    """Edits the manifest as somebody would who also mends its checksum."""
    path = folder / "manifest.json"
    fields = json.loads(path.read_text())
    change(fields)
    old, new = path.read_bytes(), json.dumps(fields, indent=1).encode() + b"\n"
    path.write_bytes(new)
    files = folder / "files.sha256"
    digests = [hashlib.sha256(text).hexdigest() for text in (old, new)]
    files.write_text(files.read_text().replace(*digests))


def test_an_edit_that_changes_nothing_is_accepted(copy):
    edit(copy, lambda fields: None)
    assert verify(copy) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.update(format="safetensors"), "not a pagedweight checkpoint"),
        (lambda f: f.pop("format"), "not a pagedweight checkpoint"),
        (lambda f: f.update(format_version=2), "format_version 2 is not supported, this version reads 1"),
        (lambda f: f.update(layout_version=99), "layout_version 99 is not supported, this version reads 1"),
        (lambda f: f.pop("layout_version"), "layout_version None is not supported"),
        (lambda f: f["arrays"]["pages/0/down/2"].update(shape=[4, 1, 128]), r"array pages/0/down/2 is uint32\[4, 1"),
        (lambda f: f["arrays"]["dense/norm_D"].update(dtype="int8"), r"array dense/norm_D is int8\[64\]"),
        (lambda f: f["arrays"].pop("calibration/tokens"), "array calibration/tokens is not listed"),
        (lambda f: f["arrays"].update({"pages/2/down/0": f["arrays"]["pages/0/down/0"]}), "pages/2/down/0 does not"),
        (lambda f: f["arrays"]["dense/norm_D"].update(crc32=7), "array dense/norm_D is damaged"),
        (lambda f: f["config"].pop("num_experts"), r"malformed \(TypeError.*num_experts"),
        (lambda f: f["config"].update(num_layers="two"), "malformed"),
        (lambda f: f["config"].update(moe_intermediate_size=64), r"array pages/0/gate_up/0 is uint32"),
        (lambda f: f["config"].update(rms_norm=1), r"malformed \(TypeError.*rms_norm"),
        (lambda f: f.update(max_bits=9), r"bits 2\.\.9"),
        (lambda f: f.update(frame_bytes=1000), "malformed.*power of two"),
        (lambda f: f.update(arrays=[]), "malformed"),
    ],
)
def test_a_wrong_manifest_is_refused(copy, change, message):
    edit(copy, change)
    with pytest.raises(UserError, match=message) as caught:
        open_checkpoint(copy).load_dense()
    assert "\n" not in str(caught.value)
    assert str(copy) in str(caught.value)


def test_a_flipped_bit_in_the_manifest_is_found(copy):
    """A number that nothing else contradicts: only the file's own checksum knows."""
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-02'))
    with pytest.raises(UserError, match=r"manifest\.json: damaged or edited"):
        open_checkpoint(copy)
    path.write_text(path.read_text()[:-40])
    with pytest.raises(UserError, match=r"manifest\.json: not JSON"):
        open_checkpoint(copy)


def test_folders_that_are_no_checkpoints_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no manifest\.json"):
        open_checkpoint(tmp_path)


# ---- geometry ----


@pytest.mark.parametrize(
    ("hidden", "expert_width", "head_dim", "frame_bytes"),
    [(2048, 1408, 128, 16384), (4096, 14336, 128, 16384), (2816, 704, 256, 16384), (384, 160, 64, 1024)],
    ids=["Qwen1.5-MoE", "Mixtral", "Gemma", "small"],
)
def test_frames_are_as_large_as_padding_allows(tiny_config, hidden, expert_width, head_dim, frame_bytes):
    config = tiny_config(hidden_size=hidden, moe_intermediate_size=expert_width, head_dim=head_dim)
    assert choose_frame_bytes(config, 3, 8) == frame_bytes
    assert padding(layouts(config, 3, 8, frame_bytes // 4)) < 0.03
    if frame_bytes < 16384:
        assert padding(layouts(config, 3, 8, frame_bytes // 2)) >= 0.03


def test_the_smallest_frame_is_taken_when_all_pad_too_much(tiny_config):
    config = tiny_config()
    assert choose_frame_bytes(config, 3, 8) == 512
    assert padding(layouts(config, 3, 8, 128)) > 0.03


@pytest.mark.parametrize(
    ("overrides", "bits", "message"),
    [
        ({"hidden_size": 48}, (3, 8), r"layer 0 gate_up 64x48: a bit-plane needs columns in multiples of 32"),
        ({"moe_intermediate_size": 40, "sparse_layers": (False, True)}, (3, 8), r"layer 1 down 64x40: a bit-plane"),
        ({}, (0, 8), r"bits 0\.\.8: need 1 <= lowest <= highest <= 8"),
        ({}, (3, 9), r"bits 3\.\.9"),
        ({}, (5, 4), r"bits 5\.\.4"),
        ({"sparse_layers": (False, False)}, (3, 8), "none of the 2 layers has routed experts"),
        ({"head_dim": 80}, (3, 8), "head_dim 80"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(tiny_config, overrides, bits, message):
    with pytest.raises(UserError, match=message):
        choose_frame_bytes(tiny_config(**overrides), *bits)
