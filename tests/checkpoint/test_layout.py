# SPDX-License-Identifier: Apache-2.0
"""Frames are as large as padding allows, and shapes that cannot be paged are refused."""

import pytest

from pagedweight_jax.checkpoint.layout import choose_frame_bytes, layouts, padding
from pagedweight_jax.errors import UserError


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
