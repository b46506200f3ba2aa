# SPDX-License-Identifier: Apache-2.0
"""The choice of experts, and the shared expert's gate."""
