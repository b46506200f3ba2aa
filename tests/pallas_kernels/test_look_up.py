# SPDX-License-Identifier: Apache-2.0
"""Codes from planes by masked swaps: the bit matrices of the look-up kernel."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe_ffn.look_up import transposed


@pytest.mark.parametrize("field_bits", [4, 8])
def test_fields_of_transposed_planes_are_codes(field_bits):
    rng = np.random.default_rng(0)
    code_JK = rng.integers(0, 2**field_bits, (32, 5))  # of bit j of word k
    planes = [
        jnp.asarray(sum(((code_JK[j] >> i & 1) << j for j in range(32)), np.int64(0)).astype(np.uint32).view(np.int32))
        for i in range(field_bits)
    ]
    words = np.array(transposed(planes)).view(np.uint32)
    found_JK = np.array([words[j % field_bits] >> (j - j % field_bits) & (2**field_bits - 1) for j in range(32)])
    np.testing.assert_array_equal(found_JK, code_JK)
    wrong = np.array(transposed([planes[1], planes[0], *planes[2:]])).view(np.uint32)  # negative control
    assert (wrong != words).any()
