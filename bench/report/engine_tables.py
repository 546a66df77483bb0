"""The tables about engines, read from the figures of one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench.report.labels import PIN_LABELS, RESTART_LABELS, label
from bench.report.tables import Figures, Table, arms_table, is_not_valid, look, middle, named_table

_DECODING = {
    "tokens per second of all streams, sgl-ext / SGLang": ("tokens_per_s_ratio",),
}
"""Where the serving benches report how fast both sides generate, without a queue."""


def warm_turn(found: Figures) -> Iterator[Table]:
    """All lengths on the first path; on the others that of the README."""
    rows: list[tuple[Any, ...]] = []
    for path in (path for path in found if path.startswith("/")):
        for planned, one in _turns(found, path).items():
            if rows and path != rows[0][0] and planned != _USUAL:
                continue
            tokens = look(one, "ours", "prompt_tokens") or planned
            keys = ("stock", "ttft_ms"), ("ours", "ttft_ms"), ("ttft_ratio",)
            host = ("stock", "host_ms"), ("ours", "host_ms"), ("host_ratio",)
            rows.append((path, tokens, *(look(one, *key) for key in (*keys, *host))))
    ttft, host_time, ratio = "TTFT, ms", "host time, ms", "SGLang / sgl-ext"
    yield Table(
        (
            *("path", "tokens"),
            *(f"SGLang: {ttft}", f"sgl-ext: {ttft}", ratio),
            *(f"SGLang: {host_time}", f"sgl-ext: {host_time}", ratio),
        ),
        rows,
    )
    yield named_table(
        found,
        {
            "cold turn: sgl-ext / SGLang": ("cold_ratio",),
            **_DECODING,
        },
    )
    yield from _stages(_turns(found).get(_USUAL, {}))
    yield _of_messages(found)


_USUAL = 52_000


def _of_messages(found: Figures) -> Table:
    """What grows with the number of messages, at the largest number."""
    rows = []
    for what, key in (("each token of an answer", "per_token_ms"), ("copies", "copies_ms")):
        sizes = look(found, key) or {}
        for count in list(sizes)[-1:]:
            both = (look(sizes, count, arm) for arm in ("stock", "ours"))
            rows.append((f"{what}, {count} messages, ms of CPU", *both))
    return Table(("", "SGLang", "sgl-ext"), rows)


def _stages(of_size: Figures) -> Iterator[Table]:
    """Medians of each stage in both arms, of those that take a millisecond in one of them."""
    arms = [look(of_size, arm, "stages_ms") or {} for arm in ("stock", "ours")]
    both = ((name, [arm.get(name, 0) for arm in arms]) for name in {**arms[0], **arms[1]})
    rows = [(label(name), *times) for name, times in both if max(map(_ms, times)) >= 1]
    yield Table(("stage of a turn of 52K tokens", "SGLang, ms", "sgl-ext, ms"), rows)


def _ms(value: Any) -> float:
    return middle(value) or 0.0


def header_strip(found: Figures) -> Iterator[Table]:
    columns = {
        "tokens, with the header": "prompt_tokens",
        "SGLang: TTFT, ms": "stock_ms",
        "sgl-ext: TTFT, ms": "ours_ms",
        "SGLang / sgl-ext": "stock_over_ours",
        "SGLang without the header: TTFT, ms": "stock_without_header_ms",
    }
    lengths = (look(found, "by_length") or {}).values()
    yield Table(tuple(columns), [[look(one, key) for key in columns.values()] for one in lengths])
    yield named_table(found, _DECODING)


def fanout(found: Figures) -> Iterator[Table]:
    yield arms_table(
        look(found, "arms"),
        {
            "TTFT p50, ms": ("ttft_p50_ms",),
            "TTFT p99, ms": ("ttft_p99_ms",),
            "computed tokens / least possible": ("prefilled_over_ideal",),
        },
    )
    yield named_table(found, {"TTFT p50, sgl-ext / SGLang": ("ttft_p50_vs_stock",), **_DECODING})


def pin_flood(found: Figures) -> Iterator[Table]:
    yield arms_table(
        look(found, "arms"),
        {
            "cached share": ("cached_share",),
            "after the TTL": ("cached_share_after_ttl",),
            "TTFT p50, ms": ("ttft_p50_ms",),
            "TTFT p99, ms": ("ttft_p99_ms",),
        },
        labels=PIN_LABELS,
    )
    ratios = look(found, "ttft_ratio") or {}
    yield Table(
        ("TTFT of a turn, sgl-ext over", "ratio"),
        [(label(name, PIN_LABELS), ratio) for name, ratio in ratios.items()],
    )
    yield named_table(
        found,
        {
            "flood / cache": ("flood_over_pool",),
            "throughput of the flood, with pins / without": ("flood_throughput_ratio",),
            "requests that waited on a pin": ("waited_on_pin",),
            **_DECODING,
        },
    )


def priority(found: Figures) -> Iterator[Table]:
    for load in ("slots", "memory"):
        arms = look(found, load, "arms")
        if is_not_valid(arms):
            yield Table((f"more than the {load} of the engine",), [(arms,)])
            continue
        yield arms_table(
            arms,
            {
                "interactive TTFT p50, ms": ("interactive", "ttft_p50_ms"),
                "p99, ms": ("interactive", "ttft_p99_ms"),
                "batch, tokens per second": ("batch_tokens_per_s",),
                "requests preempted": ("preemptions",),
            },
            f"more than the {load} of the engine",
        )
        yield named_table(
            look(found, load) or {},
            {
                "TTFT p50, sgl-ext / SGLang": ("ttft_p50_vs_fcfs",),
                "TTFT p50, sgl-ext / priority scheduling": ("ttft_p50_vs_stock_priority",),
                "tokens per second of the batch, sgl-ext / SGLang": ("batch_throughput_ratio",),
            },
        )
    yield named_table(found, _DECODING)


def speculative_prefill(found: Figures) -> Iterator[Table]:
    yield arms_table(
        look(found, "arms"),
        {
            "TTFT p50, ms": ("ttft_p50_ms",),
            "TTFT p99, ms": ("ttft_p99_ms",),
            "cached share of what was known": ("cached_share_p50",),
            "TTFT p99 of other clients, ms": ("others_ttft_p99_ms",),
        },
    )
    yield named_table(
        found,
        {
            "TTFT p50, without / sgl-ext": ("ttft_p50_ratio",),
            "requests per second of other clients, sgl-ext / without": ("others_throughput_ratio",),
            "tokens prefilled ahead": ("prefilled_ahead_tokens",),
            "of these, used by no turn": ("wasted_tokens",),
            **_DECODING,
        },
    )


def compaction(found: Figures) -> Iterator[Table]:
    for client in ("claude_code", "codex"):
        yield arms_table(
            look(found, client, "arms"),
            {
                "summary: cached share": ("summary_cached_share",),
                "until the turn after it, s": ("wait_s",),
                "TTFT of that turn, ms": ("after_ttft_ms",),
                "over a warm turn's": ("ttft_after_over_warm",),
            },
            f"as {label(client)} compacts",
        )
    yield named_table(found, {"answers unlike SGLang's": ("wrong_answers",)})


def decode(found: Figures) -> Iterator[Table]:
    yield named_table(
        found,
        {
            "tokens a step": ("tokens_a_step",),
            "share of drafted tokens that were right": ("accepted_share",),
            "tokens per second over SGLang's, one stream": ("vs_stock_1",),
            "tokens per second over SGLang's, 16 streams": ("vs_stock_16",),
            "time of a session over SGLang's": ("job_time_ratio",),
            "answers unlike the script's or SGLang's": ("wrong_answers",),
        },
    )


def restarts(found: Figures) -> Iterator[Table]:
    yield arms_table(
        look(found, "arms"),
        {
            "cached share after a rolling restart": ("cached_share",),
            "lost": ("lost",),
            "after all were killed, TTFT / prefill": ("ttft_ratio",),
            "cached then": ("read_share",),
        },
        labels=RESTART_LABELS,
    )
    yield named_table(
        found,
        {
            "answers compared": ("answers",),
            "of these, after kills": ("answers_after_kills",),
            "unlike SGLang's": ("wrong_answers",),
        },
    )


def restarts_day(found: Figures) -> Iterator[Table]:
    columns = {
        "turns": ("turns",),
        "cached / least new": ("cached_over_ideal",),
        "lost": ("lost",),
        "unlike SGLang's": ("wrong_answers",),
    }
    yield arms_table(look(found, "arms"), columns, labels=RESTART_LABELS)


def gpu(found: Figures) -> Iterator[Table]:
    """Each step of the GPU report, and the figures of those that ended well."""
    steps = look(found, "steps") or []
    ended = [(step["name"], step["status"], step["seconds"], step["why"]) for step in steps]
    yield Table(("step", "ended", "seconds", "why"), ended)
    for step in steps:
        arms = look(step["figures"], "arms")
        if isinstance(arms, Mapping):
            columns = {"TTFT p50, ms": ("ttft_p50_ms",), "TTFT p99, ms": ("ttft_p99_ms",)}
            yield arms_table(arms, columns, step["name"])


def _turns(found: Figures, path: str = "/v1/messages") -> dict[int, Figures]:
    """The figures of warm turns through a protocol, by the planned size of the prompt."""
    sizes = look(found, path) or {}
    return {int(size): of for size, of in sizes.items() if size.isdigit()}
