"""Verbs that send what a client sends: `chat` and `models`."""

import json
import sys
from typing import Annotated, Any

import typer

from sgl_ext.cli.node import HERE, Json, Key, NodeError, Url, node_at
from sgl_ext.cli.show import console, plain, print_json, table, warn

_CHAT = "/v1/chat/completions"
_MODELS = "/v1/models"


def models(url: Url = HERE, key: Key = None, as_json: Json = False) -> None:
    """List the models that the node serves, with each one's window."""
    node = node_at(url, key)
    document = node.get(_MODELS)
    if as_json:
        print_json(document)
        return
    try:
        rows = [(card["id"], card.get("context_length")) for card in document["data"]]
    except (TypeError, LookupError, AttributeError):
        raise NodeError(f"what answers at {node.url} is no node of sgl-ext") from None
    console().print(table(("model", "#window tokens"), rows))


def chat(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt.")],
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model. Default: the node's first.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="TOKENS", min=1, help="Longest answer.")
    ] = 1024,
    url: Url = HERE,
    key: Key = None,
) -> None:
    """Send one prompt, print the answer as it comes, and say how many tokens were cached."""
    node = node_at(url, key)
    body = {
        "model": model or node.model()["id"],
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage: dict[str, Any] | None = None
    for event in node.post_events(_CHAT, json.dumps(body).encode()):
        if not isinstance(event, dict):
            continue
        if error := event.get("error"):
            print()
            reason = error.get("message") if isinstance(error, dict) else error
            raise NodeError(f"{node.url}: {reason}")
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
            sys.stdout.write("\n".join(map(plain, text.split("\n"))))
            sys.stdout.flush()
    print()
    if usage is None:
        raise NodeError(f"{node.url}: the answer ended without its usage")
    details = usage.get("prompt_tokens_details") or {}
    prompt_tokens, cached = usage.get("prompt_tokens") or 0, details.get("cached_tokens") or 0
    answer = usage.get("completion_tokens") or 0
    warn(f"{cached:,} of {prompt_tokens:,} prompt tokens were cached; {answer:,} in the answer")
