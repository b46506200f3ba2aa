# SPDX-License-Identifier: Apache-2.0
"""What every verb needs: progress bars, tables and JSON."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


@contextmanager
def progress_bars() -> Iterator[tuple[Callable[[str, int, int], None], Callable[[str], None]]]:
    """Yields (progress, report): bars on stderr if that is a terminal, and lines above them in any case."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done)

        def report(line: str) -> None:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield progress, report


def print_json(value: object) -> None:
    print(json.dumps(value, indent=1))


def titled_table(title: str) -> Table:
    """Returns an empty table as all verbs print theirs."""
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
