# SPDX-License-Identifier: Apache-2.0
"""What stands before a step's first layer and behind its last one: from tokens to rows, and to the next tokens."""
