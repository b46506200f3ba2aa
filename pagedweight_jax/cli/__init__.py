# SPDX-License-Identifier: Apache-2.0
"""The command line: arguments in, tables or JSON out. What the verbs do is written elsewhere.

A mistake of the user's is one line on stderr and exit code 2. Results go to stdout, everything else to stderr.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from pagedweight_jax.cli import calibrate, checkpoint, demo, selftest, serving
from pagedweight_jax.errors import UserError


class Parser(argparse.ArgumentParser):
    """A parser whose complaint is one line, like all others, instead of the usage and a line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help)")


class Version(argparse.Action):
    """Prints the versions that a report of a bug should name."""

    def __call__(self, parser, *_) -> NoReturn:
        python = ".".join(map(str, sys.version_info[:3]))
        print(f"pagedweight {version('pagedweight-jax')}, JAX {version('jax')}, Python {python}")
        parser.exit()


def build_parser() -> Parser:
    parser = Parser(prog="pagedweight", description="Serve mixture-of-experts models whose expert weights are pages.")
    parser.add_argument("--version", action=Version, nargs=0, help="show the version, JAX's and Python's")
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
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read our output has seen enough: | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left must not fail at exit
        return 1
    except (UserError, OSError) as error:  # OSError: a missing file, a full disk, no permission
        print(f"pagedweight: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
