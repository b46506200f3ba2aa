# SPDX-License-Identifier: Apache-2.0
"""The command line: arguments in, tables or JSON out. What the verbs do is written elsewhere.

A mistake of the user's is one line on stderr and exit code 2. Results go to stdout, everything else to stderr.
"""

import argparse
import sys
from collections.abc import Sequence

from pagedweight_jax.cli import calibrate, checkpoint, demo, selftest, serving
from pagedweight_jax.errors import UserError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagedweight", description="Serve mixture-of-experts models whose expert weights are pages."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    checkpoint.add_verbs(verbs)
    calibrate.add_verbs(verbs)
    serving.add_verbs(verbs)
    demo.add_verbs(verbs)
    selftest.add_verbs(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code."""
    try:
        args = build_parser().parse_args(argv)
        return args.run(args)
    except (UserError, OSError) as error:  # OSError: a missing file, a full disk, no permission
        print(f"pagedweight: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
