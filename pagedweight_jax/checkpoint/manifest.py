# SPDX-License-Identifier: Apache-2.0
"""The manifest of a paged checkpoint: what the arrays are, and the checksums that hold them to it.

It carries no time and no path, so two conversions of one input write the same bytes.
"""

import dataclasses
import json
import zlib
from dataclasses import dataclass

import numpy as np

from pagedweight_jax.checkpoint.dense import abstract_dense, named_leaves
from pagedweight_jax.checkpoint.layout import layouts
from pagedweight_jax.config import KINDS, ModelConfig
from pagedweight_jax.errors import UserError
from pallas_kernels.bitplane import LAYOUT_VERSION, WORD_BYTES, BlockLayout

FORMAT = "pagedweight"
FORMAT_VERSION = 2
MANIFEST = "manifest.json"
IMPORTANCES = ("inputs", "fisher")
DENSE_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class ArrayInfo:
    """Shape, dtype and CRC-32 of one array's bytes (C order, little endian)."""

    shape: tuple[int, ...]
    dtype: str
    crc32: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class CalibrationRun:
    """Which text the importances and sensitivities come from, and which experts it did not reach.

    Attributes:
      text_sha256: of the calibration text's UTF-8 bytes.
      samples: sequences seen.
      sequence_length: tokens of each.
      seed: of the choice of sequences.
      min_tokens: an expert routed fewer tokens than this takes its layer's average importance.
      uncalibrated_experts: how many did.
      importance: what an error is weighted by: "inputs", or "fisher": by the loss's gradient at its row as well.
    """

    text_sha256: str
    samples: int
    sequence_length: int
    seed: int
    min_tokens: int
    uncalibrated_experts: int
    importance: str = "inputs"


@dataclass(frozen=True, kw_only=True)
class PagedManifest:
    """Everything about a paged checkpoint but the arrays' contents.

    Attributes:
      config: the model.
      min_bits, max_bits: bitwidths that the pages support.
      frame_bytes: size of an arena frame; a page is whole frames.
      calibration: where importances and sensitivities come from.
      versions: packages that wrote it.
      arrays: every array by name.
    """

    config: ModelConfig
    min_bits: int
    max_bits: int
    frame_bytes: int
    calibration: CalibrationRun
    versions: dict[str, str]
    arrays: dict[str, ArrayInfo] = dataclasses.field(default_factory=dict)

    def layouts(self) -> tuple[BlockLayout, BlockLayout]:
        """Returns the layouts of (gate_up, down) linear-blocks."""
        return layouts(self.config, self.min_bits, self.max_bits, self.frame_bytes // WORD_BYTES)


def page_name(layer: int, kind: int, page: int) -> str:
    """Name of the array that holds one page of all experts of a sparse layer."""
    return f"pages/{layer}/{KINDS[kind]}/{page}"


def array_info(array: np.ndarray) -> ArrayInfo:
    """Returns the manifest's entry for ``array``."""
    crc32 = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return ArrayInfo(shape=array.shape, dtype=array.dtype.name, crc32=crc32)


def expected_arrays(manifest: PagedManifest) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Returns the shape and the allowed dtypes of every array that such a checkpoint must hold, by name."""
    config = manifest.config
    num_layers, num_experts = config.num_sparse_layers, config.num_experts
    num_widths = manifest.max_bits - manifest.min_bits + 1
    expected = {
        f"dense/{name}": (leaf.shape, DENSE_DTYPES) for name, leaf in named_leaves(abstract_dense(config)).items()
    }
    for kind, layout in enumerate(manifest.layouts()):
        for page in range(manifest.max_bits):
            shape = (num_experts, layout.page_frames(page), layout.frame_words)
            expected |= {page_name(layer, kind, page): (shape, ("uint32",)) for layer in range(num_layers)}
        expected[f"calibration/importance/{KINDS[kind]}"] = ((num_layers, num_experts, layout.columns), ("float32",))
        if manifest.calibration.importance == "fisher":
            expected[f"calibration/fisher/{KINDS[kind]}"] = ((num_layers, num_experts, layout.rows), ("float32",))
    expected["calibration/sensitivity"] = ((num_layers, num_experts, len(KINDS), num_widths), ("float64",))
    expected["calibration/uncalibrated"] = ((num_layers, num_experts), ("bool",))
    expected["calibration/tokens"] = ((num_layers, num_experts), ("int64",))
    return expected


def check_arrays(manifest: PagedManifest) -> None:
    """Raises UserError unless the manifest lists exactly the arrays that its model and bits ask for."""
    expected = expected_arrays(manifest)
    for name, (shape, dtypes) in expected.items():
        if name not in manifest.arrays:
            raise UserError(f"{MANIFEST}: array {name} is not listed")
        info = manifest.arrays[name]
        if info.shape != shape or info.dtype not in dtypes:
            raise UserError(
                f"{MANIFEST}: array {name} is {info.dtype}{list(info.shape)}, "
                f"the model and bits ask for {' or '.join(dtypes)}{list(shape)}"
            )
    for name in manifest.arrays.keys() - expected.keys():
        raise UserError(f"{MANIFEST}: array {name} does not belong to this model")


def to_json(manifest: PagedManifest) -> str:
    """Returns the manifest as the text of ``manifest.json``."""
    fields = {"format": FORMAT, "format_version": FORMAT_VERSION, "layout_version": LAYOUT_VERSION}
    fields |= dataclasses.asdict(manifest)
    fields["arrays"] = {name: fields["arrays"][name] for name in sorted(fields["arrays"])}
    return json.dumps(fields, indent=1) + "\n"


def _tuples(fields: dict) -> dict:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def from_json(text: str) -> PagedManifest:
    """Returns the manifest read from the text of ``manifest.json``.

    Raises:
      UserError: not this format, another version of it, a field missing, or arrays that do not fit the model.
    """
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise UserError(f"{MANIFEST}: not JSON ({error})") from error
    if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
        raise UserError(f"{MANIFEST}: not a {FORMAT} checkpoint (its field format is not {FORMAT!r})")
    for key, supported in (("format_version", FORMAT_VERSION), ("layout_version", LAYOUT_VERSION)):
        if (found := fields.pop(key, None)) != supported:
            raise UserError(
                f"{MANIFEST}: {key} {found} is not supported, this version reads {supported}; convert again"
            )
    try:
        config = fields["config"] = ModelConfig(**_tuples(fields["config"]))
        sparse, windows = len(config.sparse_layers), len(config.windows)
        if not config.num_layers == sparse == windows:
            raise ValueError(f"{config.num_layers} layers, {sparse} in sparse_layers, {windows} in windows")
        fields["calibration"] = CalibrationRun(**fields["calibration"])
        fields["arrays"] = {name: ArrayInfo(**_tuples(info)) for name, info in fields["arrays"].items()}
        manifest = PagedManifest(**fields)
        check_arrays(manifest)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{MANIFEST}: malformed ({type(error).__name__}: {error})") from error
    return manifest
