"""Two request logs beside each other: before and after a change.

    sgl-ext doctor compare before.log after.log --prices prices.toml

Of each log: the shape of prompts, how stable they begin, what was computed, and what it cost. A
task is a session: all requests with one `session`. A turn is compared with the one before it of the
same task that was sent for the same kind of agent. A family is the prompts of one harness with the
same tools. A version of a client that changed how its prompts begin computes again, for each fleet
and session, what the version before had cached.

What tokens cost is in a table that the user gives:

    currency = "USD"
    computed = 3.00      # a million prompt tokens that an engine computed
    read = 0.30          # a million prompt tokens read from its cache
    output = 15.00       # a million generated tokens

    [models."qwen3"]     # other prices for one model
    computed = 0.50
"""

import sys
import tomllib
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import orjson

from sgl_ext.arguments import Arguments
from sgl_ext.doctor.report import aligned, plain
from sgl_ext.doctor.request_log import Entry, NotALog, Tokens, read_entry, readable
from sgl_ext.prompts.findings import MOST_VERSIONS

_MILLION = 1_000_000
_KINDS = ("computed", "read", "output")


class WrongPrices(Exception):
    """The table cannot be used; the message names the file, the key and the value."""


class Price(NamedTuple):
    """For a million tokens of each kind."""

    computed: float = 0.0
    read: float = 0.0
    output: float = 0.0

    def of(self, tokens: Tokens) -> float:
        """What these tokens cost."""
        parts = zip(self, (tokens.computed, tokens.read, tokens.output), strict=True)
        return sum(price * count for price, count in parts) / _MILLION


class Prices(NamedTuple):
    """by_model: the prices of models that have their own. usual: those of all others."""

    currency: str
    usual: Price
    by_model: dict[str, Price]

    def of(self, model: str, tokens: Tokens) -> float:
        """What these tokens of a model cost."""
        return self.by_model.get(model, self.usual).of(tokens)


def read_prices(path: Path) -> Prices:
    """The table in a file. Raises WrongPrices."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WrongPrices(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WrongPrices(f"{path}: {error}") from None
    currency, models = table.pop("currency", ""), table.pop("models", {})
    if not isinstance(currency, str) or len(currency) > 8:
        raise WrongPrices(f"{path}: currency={currency!r}: must be a short text")
    if not isinstance(models, dict) or not all(isinstance(m, dict) for m in models.values()):
        raise WrongPrices(f"{path}: models: must be tables, one for each model")
    usual = _price(path, "", table, Price())
    named = {n: _price(path, f"models.{n}.", table, usual) for n, table in models.items()}
    return Prices(currency, usual, named)


def _price(path: Path, prefix: str, table: dict[str, Any], usual: Price) -> Price:
    for key, value in table.items():
        if key not in _KINDS:
            known = ", ".join(_KINDS)
            raise WrongPrices(f"{path}: {prefix}{key}: is no price; there are {known}")
        if type(value) not in (int, float) or not 0 <= value < float("inf"):
            raise WrongPrices(f"{path}: {prefix}{key}={value!r}: must be a number, 0 or more")
    return usual._replace(**table)


MOST_FAMILIES = 1024
_MOST_BEGINNINGS = 4096


class FamilyKey(NamedTuple):
    """The harness, and the hash of the tools; "" without tools."""

    harness: str
    tools: str


@dataclass
class Family:
    """beginnings: hashes of tools and instructions together. versions: those of the clients."""

    tools_count: int = 0
    requests: int = 0
    tokens: Tokens = field(default_factory=Tokens)
    cost: float = 0.0
    beginnings: set[str] = field(default_factory=set)
    versions: set[str] = field(default_factory=set)


class Families:
    """Sums by family; those beyond the bound are in one without a hash of its tools."""

    def __init__(self) -> None:
        self._by_key: defaultdict[FamilyKey, Family] = defaultdict(Family)

    def __iter__(self) -> Iterator[tuple[FamilyKey, Family]]:
        return iter(self._by_key.items())

    def get(self, key: FamilyKey) -> Family | None:
        """The family of this key; None if it has no request."""
        return self._by_key.get(key)

    def add(self, entry: Entry, cost: float) -> None:
        """Adds a request and what its tokens cost."""
        key = FamilyKey(entry.harness, entry.tools)
        if key not in self._by_key and len(self._by_key) >= MOST_FAMILIES:
            key = FamilyKey(entry.harness, "")
        family = self._by_key[key]
        family.tools_count = entry.tools_count
        family.requests += 1
        family.tokens = family.tokens.plus(entry.tokens)
        family.cost += cost
        if entry.prefix and len(family.beginnings) < _MOST_BEGINNINGS:
            family.beginnings.add(entry.prefix)
        if entry.version and len(family.versions) < MOST_VERSIONS:
            family.versions.add(entry.version)


_Kind = tuple[str, str]
_ByVersion = defaultdict[_Kind, defaultdict[str, set[str]]]


class VersionChange(NamedTuple):
    """No prompt of the later version begins like one of the earlier. what: "tools" or
    "instructions"."""

    harness: str
    earlier: str
    later: str
    what: str


class Versions:
    """Compares each version with the one that came before it, by the class of its requests.

    Instructions count only where several sessions of a version share them: those that name a
    folder or a day differ between all sessions.
    """

    def __init__(self) -> None:
        self._tools: _ByVersion = defaultdict(lambda: defaultdict(set))
        self._shared: _ByVersion = defaultdict(lambda: defaultdict(set))
        self._first_s: dict[tuple[str, str], float] = {}
        self._session: dict[tuple[str, str, str, str], str] = {}

    def add(self, entry: Entry) -> None:
        """Adds a request."""
        if not entry.version or not entry.tools:
            return
        kind, came = (entry.harness, entry.agent), (entry.harness, entry.version)
        self._first_s[came] = min(self._first_s.get(came, entry.time_s), entry.time_s)
        self._tools[kind][entry.version].add(entry.tools)
        begun = self._session.setdefault((*kind, entry.version, entry.prefix), entry.session)
        if begun != entry.session:
            self._shared[kind][entry.version].add(entry.prefix)

    def changes(self) -> list[VersionChange]:
        """The versions that changed how prompts begin, each once."""
        found: dict[VersionChange, None] = {}
        for kind, tools in self._tools.items():
            harness, shared = kind[0], self._shared[kind]
            versions = sorted(tools, key=lambda version: self._first_s[harness, version])
            for earlier, later in pairwise(versions):
                old, new = shared[earlier], shared[later]
                if tools[earlier].isdisjoint(tools[later]):
                    found[VersionChange(harness, earlier, later, "tools")] = None
                elif old and new and old.isdisjoint(new):
                    found[VersionChange(harness, earlier, later, "instructions")] = None
        return list(found)


class _Task:
    """requests: of the session. latest: the hashes `prefix` and `tools` of the latest prompt of
    each kind of agent."""

    __slots__ = ("latest", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.latest: dict[str, tuple[str, str]] = {}


class Summary:
    """Sums over the requests of a log. It grows by about 20 bytes a request, 500 a task."""

    def __init__(self, prices: Prices | None = None) -> None:
        self.families = Families()
        self.requests = 0
        self.tokens = Tokens()
        self.cost = 0.0
        self._prices = prices
        self._tasks: dict[str, _Task] = {}
        self._in_tasks = Tokens()
        self._cost_in_tasks = 0.0
        self._later = self._same_prefix = self._same_tools = 0
        self._prompt_tokens, self._tools = array("L"), array("L")
        self._cached, self._ttft_ms = array("d"), array("d")

    def add(self, entry: Entry) -> None:
        """Adds a request."""
        tokens = entry.tokens
        cost = 0.0 if self._prices is None else self._prices.of(entry.model, tokens)
        self.requests += 1
        self.tokens = self.tokens.plus(tokens)
        self.cost += cost
        self.families.add(entry, cost)
        self._prompt_tokens.append(tokens.prompt)
        self._tools.append(entry.tools_count)
        self._cached.append(tokens.read / tokens.prompt)
        self._ttft_ms.append(entry.ttft_ms)
        if entry.session:
            self._in_tasks = self._in_tasks.plus(tokens)
            self._cost_in_tasks += cost
            self._add_to_task(entry)

    def _add_to_task(self, entry: Entry) -> None:
        task = self._tasks.setdefault(entry.session, _Task())
        if (latest := task.latest.get(entry.agent)) is not None:
            prefix, tools = latest
            self._later += 1
            self._same_prefix += prefix == entry.prefix
            self._same_tools += tools == entry.tools
        task.requests += 1
        task.latest[entry.agent] = entry.prefix, entry.tools

    def as_json(self) -> dict[str, Any]:
        """Its figures. Those that have nothing to count are null."""
        tasks = [task.requests for task in self._tasks.values()]
        prompts, cached = sorted(self._prompt_tokens), sorted(self._cached)
        ttfts_ms = sorted(self._ttft_ms)
        tokens, in_tasks = self.tokens, self._in_tasks
        figures: dict[str, Any] = {
            "requests": self.requests,
            "tasks": len(tasks),
            "requests_per_task_p50": median(tasks) if tasks else None,
            "prompt_tokens_p50": _at(prompts, 0.5),
            "prompt_tokens_p90": _at(prompts, 0.9),
            "prompt_tokens_max": prompts[-1] if prompts else None,
            "tools_p50": _at(sorted(self._tools), 0.5),
            "same_prefix_share": _share(self._same_prefix, self._later),
            "same_tools_share": _share(self._same_tools, self._later),
            "cached_share": _share(tokens.read, tokens.prompt),
            "cached_share_p10": _rounded(_at(cached, 0.1)),
            "cached_share_p50": _rounded(_at(cached, 0.5)),
            "cached_share_p90": _rounded(_at(cached, 0.9)),
            "ttft_ms_p50": _at(ttfts_ms, 0.5),
            "ttft_ms_p90": _at(ttfts_ms, 0.9),
            "ttft_ms_p99": _at(ttfts_ms, 0.99),
            "computed_per_task": _per(in_tasks.computed, len(tasks)),
            "read_per_task": _per(in_tasks.read, len(tasks)),
            "output_per_task": _per(in_tasks.output, len(tasks)),
        }
        if self._prices is not None:
            cost_per_task = self._cost_in_tasks / len(tasks) if tasks else None
            figures["cost"] = round(self.cost, 4)
            figures["cost_per_task"] = None if cost_per_task is None else round(cost_per_task, 6)
        return figures


def _at(ordered: Sequence[float], share: float) -> float | None:
    """The value below which this share of the ordered values is, by nearest rank."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _per(tokens: int, tasks: int) -> int | None:
    return round(tokens / tasks) if tasks else None


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


_SHOWN_FAMILIES = 20


class UnreadableLog(Exception):
    """A log cannot be read; the message says why."""


def compare_logs(argv: Sequence[str]) -> int:
    """Prints the comparison. Returns the exit code: 0, or 2 if a file cannot be read."""
    parser = Arguments(
        prog="sgl-ext doctor compare",
        allow_abbrev=False,
        description="Compares two request logs: prompts, cached tokens, TTFT, and what they cost.",
    )
    parser.add_argument("before", type=Path, metavar="BEFORE", help="a request log")
    parser.add_argument("after", type=Path, metavar="AFTER", help="a later one")
    parser.add_argument("--prices", type=Path, metavar="FILE", help="what a million tokens cost")
    parser.add_argument("--json", action="store_true", help="print JSON")
    flags = parser.parse_args(argv)
    try:
        prices = None if flags.prices is None else read_prices(flags.prices)
        document = compare(flags.before, flags.after, prices)
    except (UnreadableLog, WrongPrices) as error:
        print(f"sgl-ext doctor compare: {error}", file=sys.stderr)
        return 2
    if flags.json:
        print(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    else:
        print(as_text(document), end="")
    return 0


def compare(before: Path, after: Path, prices: Prices | None = None) -> dict[str, Any]:
    """The figures of both logs, the families of their prompts, and versions that changed them.

    `saved`: what the tasks of the later log would have cost before, less what they did; null
    without prices or tasks. Raises UnreadableLog.
    """
    versions, summaries = Versions(), []
    for path in (before, after):
        summary = Summary(prices)
        for entry in entries_of(path):
            summary.add(entry)
            versions.add(entry)
        summaries.append(summary)
    figures = [summary.as_json() for summary in summaries]
    costs = [each.get("cost_per_task") for each in figures]
    saved = None
    if costs[0] is not None and costs[1] is not None:
        saved = round((costs[0] - costs[1]) * figures[1]["tasks"], 4)
    return {
        "before": figures[0],
        "after": figures[1],
        "currency": None if prices is None else prices.currency,
        "saved": saved,
        "families": _families(summaries[0], summaries[1]),
        "version_changes": [change._asdict() for change in versions.changes()],
    }


def entries_of(path: Path) -> Iterator[Entry]:
    """The answered requests of a log. Raises UnreadableLog if no line is from a request log."""
    is_empty = True
    try:
        with path.open("rb") as lines:
            for entry in readable(lines, read_entry, f"sgl-ext doctor compare: {path}"):
                is_empty = False
                if entry is not None:
                    yield entry
        if is_empty:
            raise NotALog
    except OSError as error:
        raise UnreadableLog(f"{path}: {error.strerror}") from None
    except NotALog as error:
        raise UnreadableLog(f"{path}: {error}") from None


def _families(before: Summary, after: Summary) -> list[dict[str, Any]]:
    """The families with the most tokens in both logs."""
    keys = dict.fromkeys(key for summary in (before, after) for key, _ in summary.families)
    rows = [_row(key, before, after) for key in keys]
    rows.sort(key=lambda row: -(row["before"]["prompt_tokens"] + row["after"]["prompt_tokens"]))
    return rows[:_SHOWN_FAMILIES]


def _row(key: FamilyKey, before: Summary, after: Summary) -> dict[str, Any]:
    families = [summary.families.get(key) or Family() for summary in (before, after)]
    seen = [_figures(f, s) for f, s in zip(families, (before, after), strict=True)]
    return {
        "harness": key.harness,
        "tools_hash": key.tools or None,
        "tools": max(family.tools_count for family in families),
        "versions": sorted(families[0].versions | families[1].versions),
        "before": seen[0],
        "after": seen[1],
    }


def _figures(family: Family, summary: Summary) -> dict[str, Any]:
    tokens, total = family.tokens, summary.tokens.prompt
    return {
        "requests": family.requests,
        "beginnings": len(family.beginnings),
        "prompt_tokens": tokens.prompt,
        "share": round(tokens.prompt / total, 4) if total else 0.0,
        "computed_tokens": tokens.computed,
        "cost": round(family.cost, 4),
    }


# Each figure's name and form.
_FIGURES = (
    ("requests", "requests", "{:,}"),
    ("tasks", "tasks", "{:,}"),
    ("requests_per_task_p50", "requests of a task, p50", "{:,.0f}"),
    ("prompt_tokens_p50", "prompt tokens, p50", "{:,}"),
    ("prompt_tokens_p90", "prompt tokens, p90", "{:,}"),
    ("prompt_tokens_max", "prompt tokens, most", "{:,}"),
    ("tools_p50", "tools, p50", "{:,}"),
    ("same_prefix_share", "turns that begin as before", "{:.1%}"),
    ("same_tools_share", "turns with the same tools", "{:.1%}"),
    ("cached_share", "prompt tokens read from the cache", "{:.1%}"),
    ("cached_share_p10", "  of a request, p10", "{:.1%}"),
    ("cached_share_p50", "  of a request, p50", "{:.1%}"),
    ("cached_share_p90", "  of a request, p90", "{:.1%}"),
    ("ttft_ms_p50", "TTFT in ms, p50", "{:,.0f}"),
    ("ttft_ms_p90", "TTFT in ms, p90", "{:,.0f}"),
    ("ttft_ms_p99", "TTFT in ms, p99", "{:,.0f}"),
    ("computed_per_task", "tokens of a task: computed", "{:,}"),
    ("read_per_task", "tokens of a task: read from the cache", "{:,}"),
    ("output_per_task", "tokens of a task: generated", "{:,}"),
    ("cost", "cost", "{:,.2f}"),
    ("cost_per_task", "cost of a task", "{:,.4f}"),
)
_TOOLS_HASH_CHARS = 8


def as_text(document: Mapping[str, Any]) -> str:
    """The comparison: figures, families, versions that changed them, and what was saved."""
    before, after = document["before"], document["after"]
    rows = [("", "before", "after", "change")]
    for key, name, form in _FIGURES:
        if key in before:
            rows.append((name, *_pair(form, before[key], after[key])))
    lines = aligned(rows, range(1, 4))
    if document["families"]:
        lines += ["", "Families of prompts (the same harness and tools):"]
        lines += aligned(_family_rows(document), range(3, 8))
    for change in document["version_changes"]:
        about = {key: plain(value) for key, value in change.items()}
        lines.append(
            "\n{harness} {earlier} -> {later}: its {what} changed, so that no prompt begins like "
            "one of the version before.".format(**about)
        )
    if document["saved"] is not None:
        saved, unit = document["saved"], plain(document["currency"])
        word = "less" if saved >= 0 else "more"
        lines.append(
            f"\nThe {after['tasks']:,} tasks of the later log cost {abs(saved):,.2f} {unit} {word} "
            "than at the earlier cost of a task.".replace("  ", " ")
        )
    return "\n".join(lines) + "\n"


def _pair(form: str, before: float | None, after: float | None) -> tuple[str, str, str]:
    shown = ["-" if value is None else form.format(value) for value in (before, after)]
    change = ""
    if before and after is not None and form != "{:.1%}":
        change = f"{after / before - 1:+.1%}"
    elif before is not None and after is not None and form == "{:.1%}":
        change = f"{(after - before) * 100:+.1f} points"
    return shown[0], shown[1], change


def _family_rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    head: tuple[str, ...] = ("harness", "versions", "tools", "requests", "share", "computed")
    head += ("beginnings",)
    has_cost = document["currency"] is not None
    rows = [(*head, "cost") if has_cost else head]
    for row in document["families"]:
        sides = row["before"], row["after"]
        hash_ = f" ({row['tools_hash'][:_TOOLS_HASH_CHARS]})" if row["tools_hash"] else ""
        cells = (
            plain(row["harness"]),
            plain(", ".join(row["versions"])) or "-",
            f"{row['tools']}{hash_}",
            " -> ".join(f"{side['requests']:,}" for side in sides),
            " -> ".join(f"{side['share']:.1%}" for side in sides),
            " -> ".join(f"{side['computed_tokens']:,}" for side in sides),
            " -> ".join(f"{side['beginnings']:,}" for side in sides),
        )
        cost = (" -> ".join(f"{side['cost']:,.2f}" for side in sides),)
        rows.append((*cells, *cost) if has_cost else cells)
    return rows
