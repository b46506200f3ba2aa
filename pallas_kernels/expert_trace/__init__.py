# SPDX-License-Identifier: Apache-2.0
"""What the routed experts of all layers saw, packed into one array by one launch."""
