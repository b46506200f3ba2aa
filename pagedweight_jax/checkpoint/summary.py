# SPDX-License-Identifier: Apache-2.0
"""What a paged checkpoint holds, in numbers: the arithmetic behind ``pagedweight inspect``."""

from dataclasses import asdict
from math import prod

import numpy as np

from pagedweight_jax.checkpoint.manifest import FORMAT_VERSION
from pagedweight_jax.checkpoint.paged import PagedCheckpoint
from pagedweight_jax.checkpoint.policy import read_policy
from pagedweight_jax.config import KINDS
from pallas_kernels.bitplane import LAYOUT_VERSION, WORD_BYTES, BlockLayout


def _width(bits: int, layouts: tuple[BlockLayout, BlockLayout], num_blocks: int) -> dict:
    """One line of the M table: every linear-block at ``bits`` bits."""
    planes_bytes = sum(bits * layout.plane_words * WORD_BYTES for layout in layouts)
    payload_bytes = sum(layout.payload_bytes(bits) for layout in layouts)
    resident_bytes = sum(layout.resident_bytes(bits) for layout in layouts)
    num_weights = sum(layout.rows * layout.columns for layout in layouts)
    return {
        "bits": bits,
        "block_bytes": {name: layout.resident_bytes(bits) for name, layout in zip(KINDS, layouts)},
        "experts_bytes": num_blocks * resident_bytes,
        "bits_per_weight": 8 * resident_bytes / num_weights,
        "lut_share": 1 - planes_bytes / payload_bytes,
        "padding_share": 1 - payload_bytes / resident_bytes,
        "own_lut_experts_bytes": num_blocks * sum(layout.own_lut_bytes(bits) for layout in layouts),
    }


def _tokens(tokens_E: np.ndarray) -> dict:
    return {"fewest": int(tokens_E.min()), "median": float(np.median(tokens_E)), "most": int(tokens_E.max())}


def _coverage(checkpoint: PagedCheckpoint) -> list[dict]:
    """What calibration saw of every sparse layer."""
    layers = [layer for layer, sparse in enumerate(checkpoint.manifest.config.sparse_layers) if sparse]
    return [
        {"layer": layer, "tokens_per_expert": _tokens(tokens_E), "uncalibrated_share": float(uncalibrated_E.mean())}
        for layer, tokens_E, uncalibrated_E in zip(layers, checkpoint.tokens, checkpoint.uncalibrated)
    ]


def _policy(checkpoint: PagedCheckpoint) -> dict | None:
    """What the online planner goes by and what that was measured on; None if there is no policy."""
    online = read_policy(checkpoint)
    return online and {"run": asdict(online.run), "policy": asdict(online.policy), "fit": online.fit}


def summarize(checkpoint: PagedCheckpoint) -> dict:
    """Returns what the checkpoint holds as plain numbers, ready for JSON.

    ``widths`` is the M table: device bytes of one linear-block at each bitwidth (whole frames, LUTs min_bits .. b) and
    of all routed experts, beside what a static checkpoint that keeps one LUT would take.

    Raises:
      UserError: an array that it reads, or the policy, is damaged.
    """
    manifest = checkpoint.manifest
    config, layouts = manifest.config, manifest.layouts()
    dense = {name: info for name, info in manifest.arrays.items() if name.startswith("dense/")}
    num_blocks = config.num_sparse_layers * config.num_experts
    tokens_LE = checkpoint.tokens
    return {
        "model": {
            "family": config.family,
            "layers": config.num_layers,
            "sparse_layers": config.num_sparse_layers,
            "hidden_size": config.hidden_size,
            "experts": config.num_experts,
            "experts_per_token": config.num_experts_per_tok,
            "expert_width": config.moe_intermediate_size,
            "shared_expert_width": config.shared_expert_intermediate_size,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position_embeddings,
            "paged_parameters": num_blocks * sum(layout.rows * layout.columns for layout in layouts),
            "dense_parameters": sum(prod(info.shape) for info in dense.values()),
        },
        "blocks": {
            name: {"rows": layout.rows, "columns": layout.columns, "frames": layout.block_frames}
            for name, layout in zip(KINDS, layouts)
        },
        "frame_bytes": manifest.frame_bytes,
        "widths": [_width(bits, layouts, num_blocks) for bits in range(manifest.min_bits, manifest.max_bits + 1)],
        "dense_bytes": sum(info.nbytes for info in dense.values()),
        "dense_dtypes": sorted({info.dtype for info in dense.values()}),
        "disk_bytes": sum(path.stat().st_size for path in checkpoint.path.rglob("*") if path.is_file()),
        "calibration": {
            "text_sha256": manifest.calibration.text_sha256,
            "samples": manifest.calibration.samples,
            "sequence_length": manifest.calibration.sequence_length,
            "seed": manifest.calibration.seed,
            "min_tokens": manifest.calibration.min_tokens,
            "importance": manifest.calibration.importance,
            "experts": tokens_LE.size,
            "uncalibrated_experts": manifest.calibration.uncalibrated_experts,
            "tokens_per_expert": _tokens(tokens_LE),
            "layers": _coverage(checkpoint),
        },
        "policy": _policy(checkpoint),
        "versions": {"format": FORMAT_VERSION, "layout": LAYOUT_VERSION, **manifest.versions},
    }
