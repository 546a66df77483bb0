"""The table of clients in the docs, and the file of their versions."""

from __future__ import annotations

import datetime

from docs import clients_table
from tests.clients.install import CLIENTS, RAISED, version


def test_the_table_names_the_clients_of_the_file_at_their_versions() -> None:
    rows = clients_table.rows(clients_table.PAGE.read_text()).values()
    assert {(row[0], row[1]) for row in rows} == {(name, version(name)) for name in CLIENTS}
    assert isinstance(RAISED, datetime.date)


def test_what_was_measured_replaces_a_row_and_keeps_the_others() -> None:
    first = {"client": "A", "version": "1", "protocol": "chat", "requests": 3, "set": "a URL"}
    second = {"client": "A", "version": "2", "protocol": "chat", "share": 98.0}
    page = clients_table.page(f"Text.\n{clients_table._BEGIN}{clients_table._END}\n", [first])
    other = {**first, "client": "B", "share": 97.5}
    page = clients_table.page(page, [other, second])
    assert list(clients_table.rows(page).values()) == [
        ("A", "2", "chat", "98 %"),
        ("B", "1", "chat", "97.5 %"),
    ]
    assert clients_table.page(page, []) == page


def test_the_page_is_as_the_command_writes_it() -> None:
    text = clients_table.PAGE.read_text()
    assert clients_table.page(text, []) == text
