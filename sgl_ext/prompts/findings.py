"""Sums of divergences by harness and model: where prompts diverge, why, and what it cost.

The balancer and the reader of its request log use the same sums.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from sgl_ext.prompts.heads import VERSION
from sgl_ext.prompts.prompt import EVICTED

_LIMIT_AGENTS = 256
MOST_ROWS = 2048
MOST_VERSIONS = 8
_VERSION_CHARS = 32
OTHER = "other"
_INDEX = re.compile(r"\[\d+\]")
Agent = tuple[str, str]
Row = tuple[str, str, str, str]
_Key = TypeVar("_Key")


class Findings:
    """Sums by harness and model. Rows beyond the bounds are counted as `other`."""

    def __init__(self) -> None:
        self._agents: defaultdict[Agent, list[int]] = defaultdict(lambda: [0, 0])
        self._rows: defaultdict[tuple[Agent, Row], list[int]] = defaultdict(lambda: [0, 0])
        self._versions: defaultdict[tuple[Agent, Row], set[str]] = defaultdict(set)

    @property
    def row_count(self) -> int:
        """How many rows it has."""
        return len(self._rows)

    def add(
        self, harness: str, model: str, prompt_tokens: int, divergence: Mapping[str, Any] | None
    ) -> None:
        """Adds a prompt and the `divergence` of its line in the request log.

        Raises KeyError or TypeError, and adds nothing, if the divergence is malformed.
        """
        found = None if divergence is None else (_row(divergence), int(divergence["tokens"]))
        agent = self._add_prompts((harness, model), 1, prompt_tokens)
        if found is not None and divergence is not None:
            self._add_row(agent, found[0], 1, found[1], _versions(divergence))

    def add_prompts(self, harness: str, model: str, prompts: int, tokens: int) -> None:
        """Adds prompts that diverge nowhere."""
        self._add_prompts((harness, model), prompts, tokens)

    def _add_prompts(self, agent: Agent, prompts: int, tokens: int) -> Agent:
        return _add(self._agents, agent, (OTHER, OTHER), _LIMIT_AGENTS, prompts, tokens)

    def _add_row(
        self, agent: Agent, row: Row, times: int, tokens: int, versions: Iterable[str]
    ) -> None:
        other = (agent, (OTHER, *row[1:]))
        key = _add(self._rows, (agent, row), other, MOST_ROWS, times, tokens)
        for version in versions:
            if len(self._versions[key]) < MOST_VERSIONS:
                self._versions[key].add(version)

    def merge(self, document: Mapping[str, Any]) -> None:
        """Adds another process's `as_json`. Raises KeyError or TypeError if it is malformed."""
        for entry in document["harnesses"]:
            agent = (str(entry["harness"]), str(entry["model"]))
            agent = self._add_prompts(agent, int(entry["prompts"]), int(entry["prompt_tokens"]))
            for found in entry["findings"]:
                row = (found["where"], found["kind"], found["scope"], found["part"])
                versions = map(str, found.get("versions", ()))
                self._add_row(agent, row, int(found["times"]), int(found["tokens"]), versions)

    def as_json(self) -> dict[str, Any]:
        """Harnesses and their findings, each list sorted by lost tokens, the most first.

        `estimated`: the tokens are estimated from bytes; those of evictions are counted by engines.
        `versions`: of the clients that sent these prompts; "1.0 -> 1.1" if the earlier prompt was
        from another version, so that the upgrade may be the cause.
        """
        found: defaultdict[Agent, list[dict[str, Any]]] = defaultdict(list)
        for (agent, names), (times, tokens) in self._rows.items():
            where, kind, scope, part = names
            row: dict[str, Any] = {"where": where, "kind": kind, "scope": scope, "part": part}
            total = self._agents[agent][1]
            row |= {"times": times, "tokens": tokens, "estimated": is_estimated(kind)}
            row["share"] = round(tokens / total, 4) if total else 0.0
            row["versions"] = sorted(self._versions.get((agent, names), ()))
            found[agent].append(row)
        harnesses = [
            {
                "harness": agent[0],
                "model": agent[1],
                "prompts": prompts,
                "prompt_tokens": tokens,
                "lost_tokens": sum(row["tokens"] for row in found[agent]),
                "findings": sorted(found[agent], key=lambda row: (-row["tokens"], -row["times"])),
            }
            for agent, (prompts, tokens) in self._agents.items()
        ]
        return {"harnesses": sorted(harnesses, key=lambda entry: -entry["lost_tokens"])}


def is_estimated(kind: str) -> bool:
    """Whether the tokens of a divergence of this kind are estimated from bytes."""
    return kind != EVICTED


def _versions(divergence: Mapping[str, Any]) -> list[str]:
    """The client's version, after the earlier prompt's if that is another one."""
    version = str(divergence.get("version") or "")[:_VERSION_CHARS]
    earlier = str(divergence.get("earlier_version") or "")[:_VERSION_CHARS]
    if not version:
        return []
    return [f"{earlier} -> {version}" if earlier and earlier != version else version]


def _add(
    sums: defaultdict[_Key, list[int]], key: _Key, other: _Key, limit: int, *added: int
) -> _Key:
    """Adds to the sums of a key, or of `other` if there are too many, and returns that key."""
    key = key if key in sums or len(sums) < limit else other
    sums[key] = [old + new for old, new in zip(sums[key], added, strict=True)]
    return key


def _row(divergence: Mapping[str, Any]) -> Row:
    """Where, kind, scope and part. Indices of messages and tools are left out of `where`."""
    part, block = str(divergence["part"]), str(divergence["block"])
    where = block if part == "system" else _INDEX.sub("[*]", block, count=1)
    if divergence["scope"] == VERSION:
        where += f", byte {int(divergence['byte']):,}"
    return where, str(divergence["kind"]), str(divergence["scope"]), part


def merged(documents: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One document for the `as_json` of several processes."""
    findings = Findings()
    for document in documents:
        findings.merge(document)
    return findings.as_json()
