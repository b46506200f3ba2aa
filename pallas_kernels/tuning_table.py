# SPDX-License-Identifier: Apache-2.0
"""Block sizes as measured: written by ``python benchmarks/tune.py``, read through ``tuning.py``."""

TABLE: dict[str, dict[str, dict[str, int]]] = {}
