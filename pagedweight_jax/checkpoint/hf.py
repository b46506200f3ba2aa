# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders in: config.json and safetensors, read strictly and layer by layer.

Strictly: every tensor of the files is used or falls under a printed skip rule, every array of the model is written, and
every shape is as the configuration says. All of that is checked on the files' headers, before any weight is read.
"""

import json
import re
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from pagedweight_jax.checkpoint.dense import abstract_weights, named_leaves
from pagedweight_jax.checkpoint.tensors import read_into
from pagedweight_jax.config import ModelConfig
from pagedweight_jax.errors import UserError
from pagedweight_jax.models.families import FAMILIES, TensorSource, config_from_hf, eos_token_ids
from pagedweight_jax.models.weights import LayerWeights, Weights

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that make up a tokenizer; a folder has some of them."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}


@dataclass(frozen=True)
class Source:
    """A checked Hugging Face folder.

    Attributes:
      folder: where it is.
      config: the architecture.
      files: the safetensors file of every tensor, by tensor name; open only while it is read, so that what was read is
        not kept mapped.
      shapes: ``Weights`` with a ``jax.ShapeDtypeStruct`` for every array, in its file's dtype.
    """

    folder: Path
    config: ModelConfig
    files: dict[str, Path]
    shapes: Weights


def load_config(folder: Path) -> ModelConfig:
    """Returns the architecture in ``folder``/config.json, with the end tokens of generation_config.json if it has any.

    Raises:
      UserError: no such folder or file, not JSON, or an unsupported model.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    config = _parse_json(folder / "config.json", config_from_hf)
    generation = folder / "generation_config.json"
    eos = _parse_json(generation, eos_token_ids) if generation.exists() else ()
    return replace(config, eos_token_ids=eos) if eos else config


def open_source(folder: Path, config: ModelConfig, report: Callable[[str], None] = print) -> Source:
    """Returns the folder's checkpoint, all headers checked against ``config``, no weights read.

    Args:
      folder: holds model.safetensors, or model.safetensors.index.json and its shards.
      config: what ``load_config`` returned for it.
      report: gets one line per skip rule that applied.

    Raises:
      UserError: files are missing, damaged or ambiguous; tensors are missing, left over, duplicated, or have another
        shape or dtype than F32, F16, BF16, or experts of one layer have several.
    """
    folder = Path(folder)
    files, paths = _open_tensors(folder)
    shapes = abstract_weights(config)
    arrays = named_leaves(shapes)
    for path, leaf in arrays.items():  # before as many names as a senseless config.json asks for are made
        if (count := _num_parts(config, files, path, leaf.shape)) > len(files):
            raise UserError(f"{folder}: config.json asks for {count} tensors in {path}, the files hold {len(files)}")
    expected = dict(part for path, leaf in arrays.items() for part in parts(config, files, path, leaf.shape))
    skipped = set()
    for pattern, reason in _skip_rules(config).items():
        names = sorted(name for name in files.keys() - expected.keys() if re.fullmatch(pattern, name))
        if names:
            report(f"{folder}: skipped {_some(names)}: {reason}")
        skipped.update(names)
    missing, left_over = sorted(expected.keys() - files.keys()), sorted(files.keys() - expected.keys() - skipped)
    if missing or left_over:
        problems = [f"missing {_some(missing)}"] * bool(missing) + [f"left over {_some(left_over)}"] * bool(left_over)
        raise UserError(f"{folder}: the tensors do not match config.json: {'; '.join(problems)}")
    for name, shape in expected.items():
        header = files[name].get_slice(name)  # reads no weight
        if tuple(header.get_shape()) != shape:
            raise UserError(f"{folder}: tensor {name} has shape {tuple(header.get_shape())}, expected {shape}")
        if header.get_dtype() not in _DTYPES:
            raise UserError(f"{folder}: tensor {name} is {header.get_dtype()}; supported: {', '.join(_DTYPES)}")
    leaves = []
    for path, leaf in arrays.items():
        dtypes = {name: files[name].get_slice(name).get_dtype() for name, _ in parts(config, files, path, leaf.shape)}
        first, dtype = next(iter(dtypes.items()))
        for name, other in dtypes.items():
            if other != dtype:
                raise UserError(f"{folder}: tensor {name} is {other}, but {first} beside it is {dtype}")
        leaves.append(jax.ShapeDtypeStruct(leaf.shape, _DTYPES[dtype]))
    return Source(folder, config, paths, jax.tree.unflatten(jax.tree.structure(shapes), leaves))


def read_outer(source: Source, dtype=None) -> Weights:
    """Returns everything but the layers, as numpy arrays: embedding, final norm, head; ``layers`` is empty.

    Args:
      source: from ``open_source``.
      dtype: of the arrays; None keeps the file's.

    Raises:
      UserError: the embeddings are tied but the file holds another lm_head.
    """
    outer = _read(source, "", replace(source.shapes, layers=()), dtype)
    tensors = FAMILIES[source.config.family].tensors
    (embed,), (head,) = tensors["embed_VD"].names, tensors["lm_head_DV"].names
    tied = source.config.tie_word_embeddings and head in source.files
    if tied and not np.array_equal(*(_open_file(source.files[name]).get_tensor(name) for name in (embed, head))):
        raise UserError(f"{source.folder}: tie_word_embeddings is set, but {head} differs from {embed}")
    return outer


def read_layer(source: Source, layer: int, dtype=None) -> LayerWeights:
    """Returns one layer, as numpy arrays in ``dtype``; None keeps the file's."""
    return _read(source, f"layers.{layer}.", source.shapes.layers[layer], dtype)


def load_weights(
    folder: Path, config: ModelConfig, dtype=jnp.bfloat16, report: Callable[[str], None] = print
) -> Weights:
    """Returns the whole model on JAX's default device, in ``dtype``; None keeps the file's.

    Errors as ``open_source`` and ``read_outer``.
    """
    source = open_source(folder, config, report)
    layers = [jax.tree.map(jnp.asarray, read_layer(source, layer, dtype)) for layer in range(config.num_layers)]
    return replace(jax.tree.map(jnp.asarray, read_outer(source, dtype)), layers=tuple(layers))


def _skip_rules(config: ModelConfig) -> dict[str, str]:
    """Regular expression -> reason."""
    family = FAMILIES[config.family]
    if not config.tie_word_embeddings:
        return family.skipped
    (head,) = family.tensors["lm_head_DV"].names
    return family.skipped | {re.escape(head): "the head is the tied embedding"}


def _locate(config: ModelConfig, path: str) -> tuple[TensorSource, str]:
    """The table's entry for a dotted path in ``Weights``, and the layer number in it."""
    match = re.fullmatch(r"(?:layers\.(\d+)\.)?(.*)", path)
    key = path if match[1] is None else f"layers.{match[2]}"
    return FAMILIES[config.family].tensors[key], match[1]


def _num_parts(config: ModelConfig, files: Container[str], path: str, shape: tuple[int, ...]) -> int:
    """Returns how many ``parts`` there are."""
    entry, layer = _locate(config, path)
    fused = entry.fused and entry.fused.format(layer=layer) in files
    return shape[0] * len(entry.names) if entry.form == "per_expert" and not fused else 1


def parts(
    config: ModelConfig, files: Container[str], path: str, shape: tuple[int, ...]
) -> list[tuple[str, tuple[int, ...]]]:
    """Returns (tensor name, shape in the file) of everything that makes up an array of ``Weights``.

    Args:
      config: the model.
      files: holds the names of the folder's tensors; experts come one by one unless a fused one is among them.
      path: the array's dotted path.
      shape: of the array.
    """
    entry, layer = _locate(config, path)
    if entry.fused and (fused := entry.fused.format(layer=layer)) in files:
        return [(fused, shape)]
    if entry.form == "per_expert":
        rows = shape[1] // len(entry.names)
        return [
            (name.format(layer=layer, expert=expert), (rows, shape[2]))
            for expert in range(shape[0])
            for name in entry.names
        ]
    in_file = {"same": shape, "transposed": shape[::-1], "row": (1, *shape)}[entry.form]
    return [(name.format(layer=layer), in_file) for name in entry.names]


def _read(source: Source, prefix: str, shapes: Any, dtype) -> Any:
    """Returns the tree ``shapes`` with its arrays read. ``prefix`` is its dotted path in ``Weights``."""
    stacks, wanted = {}, []
    for path, leaf in named_leaves(shapes).items():
        found = parts(source.config, source.files, prefix + path, leaf.shape)
        stacks[path] = np.empty((len(found), *found[0][1]), leaf.dtype)
        wanted += [(source.files[name], name, array) for (name, _), array in zip(found, stacks[path])]
    read_into(wanted)
    leaves = []
    for path, leaf in named_leaves(shapes).items():
        stack = stacks.pop(path)
        if _locate(source.config, prefix + path)[0].form == "transposed":
            stack = _transposed(stack[0])
        leaves.append(stack.reshape(leaf.shape).astype(dtype or leaf.dtype, copy=False))
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _transposed(x_NC: np.ndarray) -> np.ndarray:
    """Returns the transpose, in C order: some rows at a time, which is up to ten times as fast as numpy's copy."""
    x_CN = np.empty(x_NC.shape[::-1], x_NC.dtype)
    for n in range(0, len(x_NC), 32):
        x_CN[:, n : n + 32] = x_NC[n : n + 32].T
    return x_CN


def _open_tensors(folder: Path) -> tuple[dict[str, Any], dict[str, Path]]:
    """Returns the open file and its path of every tensor, by tensor name."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.exists() and index.exists():
        raise UserError(f"{folder} holds both {_SINGLE} and {_INDEX}: remove the one that is stale")
    weight_map = _read_weight_map(index) if index.exists() else None
    names = [_SINGLE] if weight_map is None else sorted(set(weight_map.values()))
    if weight_map is None and not single.exists():
        raise UserError(f"{folder} holds neither {_SINGLE} nor {_INDEX}; other formats are not read")
    files, shard_of = {}, {}
    for name in names:
        file = _open_file(folder / name)
        for tensor in sorted(file.keys()):
            if tensor in files:
                raise UserError(f"{folder}: tensor {tensor} is in both {shard_of[tensor]} and {name}")
            files[tensor], shard_of[tensor] = file, name
    for tensor, name in (weight_map or {}).items():
        if shard_of.get(tensor) != name:
            raise UserError(f"{index}: tensor {tensor} is not in {name}, where the index puts it")
    return files, {tensor: folder / name for tensor, name in shard_of.items()}


def _open_file(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"{path} does not exist, but the checkpoint's index names it")
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as e:
        raise UserError(f"{path} is damaged or not a safetensors file: {e}") from e


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: weight_map is missing or empty")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise UserError(f"{index}: tensor {tensor} must name a file of the same folder, got {name!r}")
    return weight_map


def _parse_json(path: Path, parse: Callable[[dict[str, Any]], Any]) -> Any:
    """Returns ``parse`` of the file's object; its errors get the file's name."""
    raw = _read_json(path)
    try:
        return parse(raw)
    except UserError as e:
        raise UserError(f"{path}: {e}") from e


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise UserError(f"{path} does not exist") from e
    except (OSError, ValueError) as e:
        raise UserError(f"{path} is not readable JSON: {e}") from e
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _some(names: list[str], shown: int = 3) -> str:
    """'3 tensors (a, b, c)', the rest cut."""
    more = ", ..." if len(names) > shown else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:shown])}{more})"
