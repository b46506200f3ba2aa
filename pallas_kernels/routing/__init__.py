# SPDX-License-Identifier: Apache-2.0
"""The norm before the experts, and the choice of experts."""
