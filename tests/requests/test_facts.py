"""The header's facts survive its removal."""

from __future__ import annotations

from sgl_ext.requests.facts import ClientFacts


def test_claude_codes_fields_become_facts() -> None:
    fields = {"cc_version": "2.1", "cc_entrypoint": "cli", "cc_workload": "cron", "cch": "0"}
    assert ClientFacts.from_fields(fields) == ClientFacts("2.1", "cli", "cron", False)
    assert ClientFacts.from_fields({"cc_is_subagent": "TRUE"}).is_subagent
    assert ClientFacts.from_fields({"version": "1"}).version == "1"


def test_unstated_facts_are_none() -> None:
    assert ClientFacts.from_fields({}) == ClientFacts()
