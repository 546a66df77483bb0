"""Which default hints a request gets: those of its tenant, its agent, its harness and its model.

Each hint is taken from the first table that has it, in the order of `HINTED`. The tenant is first,
as what was agreed with a team holds for all that it sends. Then the kind of agent: its type as the
harness names it, and after that what the harness sends the request for, such as `subagent`. The
harness knows how its agents work in general. The model is the same for everybody who uses it, so it
is last.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sgl_ext.reading.client import SUBAGENT, harness_of, read_headers
from sgl_ext.settings.schema import HINTED, DefaultHint
from sgl_ext.wire.headers import NO_DEFAULTS, DefaultHints

# A field of the header line that leads Claude Code's prompts, and that is stripped.
_BILLING, _IS_SUBAGENT = "cc_version", "cc_is_subagent"


class HintRules:
    """The operator's default hints. `if rules` is whether there are any."""

    def __init__(self, rows: Sequence[DefaultHint] = ()) -> None:
        self._tables: dict[str, dict[str, DefaultHints]] = {of: {} for of in HINTED}
        for row in rows:
            hints = DefaultHints(row.priority, row.osl, row.prefill, row.ttl_s)
            self._tables[row.of][row.name] = hints
        self._has_any = bool(rows)

    def __bool__(self) -> bool:
        return self._has_any

    def asked(self, tenant: str, headers: Mapping[bytes, bytes]) -> "AskedHints":
        """What is known of a request before its body is read. headers: with lower-case names."""
        plain = billed = ""
        agent: tuple[str, ...] = ()
        if self._tables["harness"]:
            plain, billed = harness_of(headers, {}), harness_of(headers, {_BILLING: ""})
        if self._tables["agent"]:
            facts = read_headers(headers)
            agent = (facts.agent_type, facts.request_class)
        return AskedHints(self, tenant, plain, billed, agent)

    def named(self, names: Mapping[str, Sequence[str]]) -> list[tuple[str, DefaultHints]]:
        """The hints of these names, by what they are of, the first to win first."""
        found = [(of, name, self._tables[of].get(name)) for of in HINTED for name in names[of]]
        return [(f"{of} {name}", hints) for of, name, hints in found if hints is not None]


class AskedHints(NamedTuple):
    """A request's tenant, and its harness: without a stripped header line, and with Claude Code's.
    It goes to the process that reads large bodies.

    agent: names of its kind of agent, as its headers state them, the most special first.
    """

    rules: HintRules
    tenant: str
    harness: str
    billed: str
    agent: tuple[str, ...] = ()

    def of(self, body: Any, stripped: Mapping[str, str]) -> DefaultHints:
        """The defaults of a request. stripped: the fields of its stripped header lines."""
        merged = NO_DEFAULTS
        for _, hints in self._named(body, stripped):
            merged = hints if merged is NO_DEFAULTS else merged.over(hints)
        return merged

    def explain(self, body: Any, stripped: Mapping[str, str]) -> dict[str, Any]:
        """Each default that a request has, with the table that it is from."""
        found: dict[str, Any] = {}
        for source, hints in self._named(body, stripped):
            for key in hints.__struct_fields__:
                if (value := getattr(hints, key)) is not None and key not in found:
                    found[key] = {"value": value, "from": source}
        return found

    def _named(self, body: Any, stripped: Mapping[str, str]) -> list[tuple[str, DefaultHints]]:
        model = body.get("model") if isinstance(body, dict) else None
        agent = self.agent
        if agent and not agent[-1] and stripped.get(_IS_SUBAGENT) == "true":
            agent = (*agent, SUBAGENT)
        return self.rules.named(
            {
                "tenant": (self.tenant,),
                "agent": agent,
                "harness": (self.billed if _BILLING in stripped else self.harness,),
                "model": (model if isinstance(model, str) else "",),
            }
        )
