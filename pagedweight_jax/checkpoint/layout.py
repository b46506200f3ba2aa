# SPDX-License-Identifier: Apache-2.0
"""Which frame size a model's pages take, and the two block layouts that follow from it."""

from pagedweight_jax.config import DOWN, GATE_UP, KINDS, ModelConfig
from pagedweight_jax.errors import UserError
from pallas_kernels.bitplane import WORD_BYTES, BlockLayout

FRAME_BYTES = (16384, 8192, 4096, 2048, 1024, 512)
MAX_PADDING = 0.03
KV_BYTES = 2


def check_geometry(config: ModelConfig, min_bits: int, max_bits: int) -> None:
    """Raises UserError if the model's linear-blocks cannot be cut into bit-planes of these bitwidths."""
    if not 1 <= min_bits <= max_bits <= 8:
        given = min_bits if min_bits == max_bits else f"{min_bits}..{max_bits}"
        raise UserError(f"bits {given}: need 1 <= lowest <= highest <= 8")
    if not config.num_sparse_layers:
        raise UserError(f"{config.family}: none of the {config.num_layers} layers has routed experts, nothing to page")
    first_sparse_layer = config.sparse_layers.index(True)
    for kind, name in enumerate(KINDS):
        rows, columns = config.block_shape(kind)
        if columns % 32:
            raise UserError(
                f"layer {first_sparse_layer} {name} {rows}x{columns}: a bit-plane needs columns in multiples of 32"
            )


def layouts(config: ModelConfig, min_bits: int, max_bits: int, frame_words: int) -> tuple[BlockLayout, BlockLayout]:
    """Returns the layouts of (gate_up, down) linear-blocks.

    Args:
      config: the model.
      min_bits, max_bits: the supported bitwidths.
      frame_words: uint32 words of an arena frame.

    Raises:
      UserError: the model's shapes or the bits cannot be laid out.
      ValueError: the frame is not a power of two or smaller than a tile.
    """
    check_geometry(config, min_bits, max_bits)
    gate_up, down = (
        BlockLayout(*config.block_shape(kind), kind == GATE_UP, min_bits, max_bits, frame_words)
        for kind in (GATE_UP, DOWN)
    )
    return gate_up, down


def padding(layout_pair: tuple[BlockLayout, BlockLayout]) -> float:
    """Returns the share of page bytes that whole frames waste, at the bitwidth where it is largest."""

    def share(bits: int) -> float:
        payload_bytes = sum(layout.payload_bytes(bits) for layout in layout_pair)
        return 1 - payload_bytes / sum(layout.resident_bytes(bits) for layout in layout_pair)

    return max(share(bits) for bits in range(layout_pair[0].min_bits, layout_pair[0].max_bits + 1))


def choose_frame_bytes(config: ModelConfig, min_bits: int, max_bits: int) -> int:
    """Returns the largest frame, 512 bytes to 16 KiB, that wastes under 3 % of the pages; else the smallest valid one.

    Valid means: a tile and a LUT row fit in a frame, and a frame holds whole 16-bit KV vectors of one head.

    Raises:
      UserError: no frame is valid for this model.
    """
    check_geometry(config, min_bits, max_bits)
    valid = []
    for frame_bytes in FRAME_BYTES:
        try:
            pair = layouts(config, min_bits, max_bits, frame_bytes // WORD_BYTES)
        except ValueError:  # smaller than a tile
            continue
        if frame_bytes % (config.head_dim * KV_BYTES):
            continue
        if padding(pair) < MAX_PADDING:
            return frame_bytes
        valid.append(frame_bytes)
    if not valid:
        raise UserError(
            f"{config.family}: no frame of {FRAME_BYTES[-1]}..{FRAME_BYTES[0]} bytes holds whole KV vectors of "
            f"head_dim {config.head_dim} (a power of two is needed)"
        )
    return valid[-1]
