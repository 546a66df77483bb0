"""`sgl-ext status`: a node at a glance."""

import typer
from rich.table import Table
from rich.text import Text

from sgl_ext.cli.node import node_at
from sgl_ext.cli.options import HERE, Json, Key, Url
from sgl_ext.cli.show import cell, console, duration, percent, plain, print_json, state, table
from sgl_ext.cli.state import STATE, Engine, State, read_state

OK = "ok"
_HEADS = ("state", "#running", "#waiting", "#KV used", "#pinned", "#free", "#hit rate")


def status(url: Url = HERE, key: Key = None, as_json: Json = False) -> None:
    """Show a node: its engines, queue and cache.

    Exit code 1: no engine is ready, the node drains, or none answers.
    """
    node = node_at(url, key)
    document = node.get(STATE)
    found = read_state(document, node)
    if as_json:
        print_json(document)
    else:
        shown = console()
        for line in (headline(found, node.url), figures(found)):
            shown.print(line, soft_wrap=True)
        if found.engines:
            shown.print()
            shown.print(engines_table(found.engines))
    if found.node.status != OK:
        raise typer.Exit(1)


def headline(found: State, url: str) -> str:
    """Where the node is, and what runs there."""
    version = found.version
    commit = f" ({version.commit})" if version.commit else ""
    parts = [f"sgl-ext {version.sgl_ext}{commit}" if version.sgl_ext else "sgl-ext"]
    parts += [f"SGLang {version.sglang}"] if version.sglang else []
    parts += [url]
    return plain(", ".join(parts))


def figures(found: State) -> str:
    """Its state and load in a line."""
    node, recent = found.node, found.recent
    parts = [node.status]
    if node.model:
        parts.append(f"model {node.model}")
    if node.started_s is not None and node.now_s is not None:
        parts.append(f"up {duration(node.now_s - node.started_s)}")
    parts.append(f"{cell(node.in_flight)} in flight")
    parts.append(queue_line(found))
    if recent.hit_rate is not None:
        parts.append(f"hit rate {percent(recent.hit_rate)}")
    if recent.ttft_p50_s is not None:
        parts.append(f"TTFT p50 {cell(recent.ttft_p50_s)} s, p99 {cell(recent.ttft_p99_s)} s")
    if node.saved_bytes:
        parts.append(f"{node.saved_bytes / 1e6:,.1f} MB not sent again")
    return plain("   ".join(parts))


def queue_line(found: State) -> str:
    """How many requests wait, of how many that may, and at which priorities."""
    queue = found.queue
    limit = "" if queue.limit is None else f" of {queue.limit:,}"
    bands = [band for band in queue.by_priority if band.waiting]
    shown = ", ".join(f"{band.waiting:,} at priority {band.priority}" for band in bands)
    return f"{cell(queue.waiting)}{limit} queued" + (f" ({shown})" if shown else "")


def engines_table(engines: list[Engine]) -> Table:
    """A row for each engine."""
    return table(("engine", *_HEADS), map(engine_row, engines))


def engine_row(engine: Engine) -> tuple[object, ...]:
    """Its id, state, running and waiting requests, used, pinned and free tokens, and hit rate."""
    kv = engine.kv
    tokens = (kv.used_tokens, kv.pinned_tokens, kv.free_tokens) if kv else (None,) * 3
    return (
        engine.id,
        _state_of(engine),
        engine.running,
        engine.waiting,
        *tokens,
        percent(engine.hit_rate),
    )


def _state_of(engine: Engine) -> Text:
    """Its state, with the stage and the part that is loaded, or with its fault."""
    said = state(engine.state)
    loaded = "" if engine.progress is None else f" {engine.progress:.0%}"
    detail = f"{engine.stage}{loaded}" if engine.stage else engine.fault
    detail = engine.note if engine.state == "ready" else detail
    if detail:
        said.append(plain(f": {detail}"), style="default")
    return said
