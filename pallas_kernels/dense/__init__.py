# SPDX-License-Identifier: Apache-2.0
"""Products of token rows with dense matrices, with what stands before and after them."""
