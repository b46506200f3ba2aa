# SPDX-License-Identifier: Apache-2.0
"""Makes the benchmark scripts importable: they import one another by their plain names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
