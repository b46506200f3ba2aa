# SPDX-License-Identifier: Apache-2.0
"""``python -m pagedweight_jax.cli``, the same as ``pagedweight``."""

import sys

from pagedweight_jax.cli import main

sys.exit(main())
