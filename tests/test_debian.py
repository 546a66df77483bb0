"""What the tests' last line says of those that were skipped."""

from __future__ import annotations

from tests.conftest import skips_line
from tests.debian import INSTALL


def test_the_last_line_names_what_was_skipped_and_one_command_for_all_packages() -> None:
    reasons = [
        f"Skipped: not installed: {INSTALL}prometheus",
        f"Skipped: not installed: {INSTALL}prometheus",
        f"Skipped: not installed: {INSTALL}libibverbs1 libnl-route-3-200",
        "Skipped: there is no GPU that torch can use",
    ]
    assert skips_line(reasons) == (
        "4 skipped: there is no GPU that torch can use (1); to run the others: "
        f"{INSTALL}prometheus libibverbs1 libnl-route-3-200"
    )
    assert skips_line([]) == ""
