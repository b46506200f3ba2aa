# SPDX-License-Identifier: Apache-2.0
"""Block sizes as measured: written by ``python benchmarks/tune.py``, read through ``tuning.py``."""

TABLE: dict[str, dict[str, dict[str, int]]] = {
    "NVIDIA H200": {
        "moe_ffn_grouped 28672 x 4096": {"tile": 192},
    },
}
