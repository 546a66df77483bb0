"""Command lines that argparse reads, with the help and the errors of the other verbs."""

import argparse
import re
import shutil
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rich.panel import Panel

_ARGUMENT = re.compile(r"^argument (\S+?)(/\S+)?: ")
_TITLES = {"positional arguments": "Arguments", "options": "Options"}
_LEAST_COLUMNS = 40


class Arguments(argparse.ArgumentParser):
    """A parser whose error is one line, and whose help has a panel for each group."""

    def error(self, message: str) -> NoReturn:
        """Ends the command with 2."""
        print(f"{self.prog}: {plain_error(message)} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)

    def format_help(self) -> str:
        # A process that reads its flags needs no rich.
        from rich.console import Console

        width = max(shutil.get_terminal_size().columns, _LEAST_COLUMNS)
        console = Console(
            width=width, highlight=False, markup=False, emoji=False, no_color=True, file=sys.stdout
        )
        with console.capture() as captured:
            usage = " ".join(self.format_usage().split()).removeprefix("usage: ")
            console.print(f"\n Usage: {usage}\n")
            for text in (self.description, self.epilog):
                if text:
                    console.print(f" {text}\n")
            for group in self._action_groups:
                if actions := [a for a in group._group_actions if a.help != argparse.SUPPRESS]:
                    title = _TITLES.get(group.title or "", group.title)
                    console.print(_panel(title, [row for a in actions for row in self._rows(a)]))
        return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"

    def _rows(self, action: argparse.Action) -> list[tuple[str, str]]:
        if isinstance(action, argparse._SubParsersAction):
            return [(choice.dest, choice.help or "") for choice in action._choices_actions]
        text = (action.help or "") % {"prog": self.prog}
        metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
        if not action.option_strings:
            return [(metavar, text)]
        names = action.option_strings
        if isinstance(action, argparse.BooleanOptionalAction):
            return [(f"--[no-]{names[0].removeprefix('--')}", text)]
        # Further names, as those of SGLang for one flag, do not help here.
        shown = ", ".join(names if names[0].count("-") == 1 else names[:1])
        return [(shown if action.nargs == 0 else f"{shown} {metavar}", text)]


def plain_error(message: str) -> str:
    """A message of argparse's, beginning with the flag that is wrong."""
    return _ARGUMENT.sub(r"\1: ", message)


def _panel(title: str | None, rows: list[tuple[str, str]]) -> "Panel":
    from rich.box import ROUNDED
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, text in rows:
        grid.add_row(Text(name), Text(text))
    return Panel(grid, title=title, title_align="left", box=ROUNDED)
