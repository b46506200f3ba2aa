# SPDX-License-Identifier: Apache-2.0
"""The one exception for what a user can get wrong."""


class UserError(Exception):
    """One clear line: what is wrong, where, and the numbers. The command line prints it and exits with code 2."""
