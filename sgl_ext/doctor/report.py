"""The findings as text for people and as JSON for programs, with the advice on each kind."""

import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH = 96
_HEAD = ("tokens", "share", "times", "where", "between", "what")
_NUMBERS = range(3)
_ESTIMATED = "\nNumbers with ~ are estimated from bytes; engines counted the others.\n"
_BETWEEN = {"session": "turns", "fleet": "sessions", "version": "versions"}
MEANINGS = {
    "clock": "a date or time changes",
    "id": "an id or a long number changes",
    "tool_order": "the same tools in another order",
    "tools_changed": "tools were added, removed or changed",
    "rewritten": "earlier messages changed",
    "truncated": "earlier messages were shortened or left out",
    "header": "a header line that is not stripped changes",
    "tenant_field": "a field that names a tenant or a user changes",
    "response_format": "an output format or a schema changes",
    "task_list": "a task list changes",
    "compaction": "a summary replaces earlier messages",
    "evicted": "the prompt is the same, and the engine no longer had it",
    "context_changed": "the session moved to another context, in which this block differs",
    "new_version": "a new version of the client begins its prompts otherwise",
    "ttl_cut": "the client says that it asks for an hour, and its marks ask for five minutes",
    "unknown": "a text changes",
}
_DO = {
    "ttl_cut": "let the proxy before this node pass `ttl` on: LiteLLM cuts 1h to five minutes "
    "unless its settings say otherwise",
    "tool_order": "start the launcher with --sort-tools, or send tools in one order",
    "tools_changed": "offer the same tools in every turn, new ones last; leave a tool unused "
    "by tool_choice instead of removing it",
    "rewritten": "send the history back unchanged, with all output of the model and its thinking",
    "truncated": "shorten the history rarely and by much, not a little in every turn",
    "header": "start the launcher with --strip-header NAME, the name that this block begins with",
    "response_format": "send the format as a field of the request (response_format, text.format, "
    "output_config), which is no part of the prompt, or write it into the last message",
    "task_list": "keep the task list out of {part}: send it as the last message or as a tool's "
    "result, and leave earlier copies as they were",
    "compaction": "let the request that writes the summary have the same tools and instructions, "
    "and compact rarely: raise the size at which the client compacts",
    "context_changed": "build the context no more often than needed, and put what changes most "
    "into a later layer; sgl-ext context build names the line",
    "new_version": "upgrade all clients together, as the two versions share nothing after it, and "
    "prefill the new beginning once at the start: the launcher's --warmup-requests",
    "evicted": "give the cache more room (more KV memory, a host cache, fewer prompts at once), "
    "mark the prefix with a longer TTL or pin it; look for flushes and restarts of the engine",
}
_DO_IN_HEAD = {
    "clock": "move the date or time out of {part}, into the last message, or round it to the day; "
    "the launcher's --move-volatile-lines moves known lines",
    "id": "move the id out of {part}, into a header or the last message",
    "tenant_field": "let the gateway send the tenant as a header or as metadata, not in {part}; "
    "if the model needs it, write it into the first message",
    "unknown": "move what changes (a folder, a state, a name) to the end of {part} or into "
    "the first message; the launcher's --move-volatile-lines moves known lines",
}
_DO_IN_MESSAGES = {
    "clock": "write a date or time once, into the message that it belongs to, and do not update it",
    "id": "send messages back with the ids they had",
}
_PARTS = {
    "tools": "the tools",
    "system": "the instructions",
    "messages": "the messages",
    "cache": "the fields that separate caches",
}


def advice(kind: str, part: str) -> str:
    """What to do about a divergence of this kind in this part of the prompt."""
    by_part = _DO_IN_MESSAGES if part == "messages" else _DO_IN_HEAD
    other = "compare two requests of this client at that place"
    text = _DO.get(kind) or by_part.get(kind, other)
    return text.format(part=_PARTS.get(part, part))


def version_sentence(harness: str, divergence: Mapping[str, Any]) -> str:
    """What a new version of a client does to the cache, and the cure."""
    kind, part = str(divergence["kind"]), str(divergence["part"])
    later, earlier = plain(divergence["version"]), plain(divergence["earlier_version"])
    often = "once" if kind == "new_version" else "from prompt to prompt"
    where = f"byte {divergence['byte']:,} of {plain(divergence['block'])}"
    lost = f"about {divergence['tokens']:,} tokens that {earlier} shared are computed again"
    return (
        f"{plain(harness)} {later} moves {where} {often}: {lost}; the cure is: {advice(kind, part)}"
    )


def add_advice(document: Mapping[str, Any]) -> None:
    """Adds the meaning and the advice to each finding of a document."""
    for entry in document["harnesses"]:
        for row in entry["findings"]:
            row["means"] = MEANINGS.get(row["kind"], row["kind"])
            row["advice"] = advice(row["kind"], row["part"])


def as_text(document: Mapping[str, Any]) -> str:
    """The report: for each harness and model a table and the advice that `add_advice` added."""
    harnesses = document["harnesses"]
    less = "".join(
        f"{plain(engine)} serves with less: {plain(', '.join(features))} (docs/guide/models.md)\n"
        for engine, features in document.get("with_less", {}).items()
    )
    if not harnesses:
        return f"{less}There are no prompts yet.\n"
    text = less + "\n".join(_of_harness(entry) for entry in harnesses)
    rows = (row for entry in harnesses for row in entry["findings"])
    return text + (_ESTIMATED if any(row.get("estimated", True) for row in rows) else "")


def _of_harness(entry: Mapping[str, Any]) -> str:
    model = f", model {plain(entry['model'])}" if entry["model"] else ""
    title = f"{plain(entry['harness'])}{model}: "
    prompts = "prompt" if entry["prompts"] == 1 else "prompts"
    title += f"{entry['prompts']:,} {prompts}, {entry['prompt_tokens']:,} tokens"
    if not entry["findings"]:
        return f"{title}\n  No prompt diverges from earlier ones.\n"
    total = entry["prompt_tokens"]
    share = f" ({entry['lost_tokens'] / total:.1%})" if total else ""
    sign = _sign(any(row.get("estimated", True) for row in entry["findings"]))
    title += f", of them {sign}{entry['lost_tokens']:,}{share} computed again"
    rows = [_HEAD, *(_cells(row) for row in entry["findings"])]
    table = (f"  {line}" for line in aligned(rows, _NUMBERS))
    lines = [title, *table, "  What to do:"]
    places_by_advice: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for row in entry["findings"]:
        places_by_advice[row["advice"]][row["where"]] = None
    for what, places in places_by_advice.items():
        text = f"{plain(', '.join(places))}: {what}."
        lines += textwrap.wrap(text, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    between = _BETWEEN.get(row["scope"], row["scope"])
    tokens = f"{_sign(row.get('estimated', True))}{row['tokens']:,}"
    counts = (tokens, f"{row['share']:.1%}", f"{row['times']:,}")
    what = f"{row['kind']}: {row['means']}"
    if versions := row.get("versions"):
        what += f" (version {plain(', '.join(versions))})"
    return (*counts, plain(row["where"]), between, what)


def _sign(is_estimated: bool) -> str:
    """What stands before a number that is estimated."""
    return "~" if is_estimated else ""


def aligned(rows: Sequence[Sequence[str]], numbers: range) -> list[str]:
    """A line for each row: columns of numbers to the right, those of words to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in numbers else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def plain(text: object) -> str:
    """A client's text without characters that could control the terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(text))
