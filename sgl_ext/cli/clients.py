"""`sgl-ext clients`: how to connect Claude Code, Codex, OpenCode and the SDKs to a node."""

import json
import shlex
from typing import Annotated, Any

import typer

from sgl_ext.cli.node import Node, NodeError, UsageError, node_at
from sgl_ext.cli.options import HERE, Json, Key, Url
from sgl_ext.cli.show import console, plain, print_json

_KEY, _NO_KEY = "YOUR_KEY", "any"
_KEY_VARIABLE = "SGL_KEY"


def clients(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Only this one, such as codex.")
    ] = None,
    url: Url = HERE,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Print how to connect Claude Code, Codex, OpenCode and the SDKs to the node."""
    node = node_at(url, key)
    model, needs_key = _model(node), _needs_key(node)
    known = _clients(node.url, model, needs_key)
    if name is not None and name not in known:
        raise UsageError(f"clients: {name}: must be one of {', '.join(known)}")
    chosen = known if name is None else {name: known[name]}
    if as_json:
        rows = [{"name": each, "how": text} for each, (_, text) in chosen.items()]
        document = {"address": node.url, "model": model, "needs_key": needs_key, "clients": rows}
        print_json(document)
        return
    shown = console()
    for title, text in chosen.values():
        shown.print(title, style="bold")
        for line in text.splitlines():
            # Whole lines, as they are copied from here.
            shown.print(f"  {plain(line)}", soft_wrap=True)
        shown.print()


def _model(node: Node) -> str:
    """The name by which clients request the model. Raises NodeError."""
    try:
        return str(node.get("/v1/models")["data"][0]["id"])
    except (TypeError, LookupError):
        raise NodeError(f"what answers at {node.url} is no node of sgl-ext") from None


def _needs_key(node: Node) -> bool:
    """Whether clients of the node need a key."""
    if node.key is None:
        return False  # it has shown its models without one
    try:
        Node(node.url).get("/v1/models")
    except NodeError as error:
        return error.status == 401
    return False


def _clients(url: str, model: str, needs_key: bool) -> dict[str, tuple[str, str]]:
    """For each client by its short name: its title and what to run or write."""
    key = _KEY if needs_key else _NO_KEY
    quoted = json.dumps(model)  # valid TOML and Python, too
    claude = f"ANTHROPIC_BASE_URL={shlex.quote(url)} ANTHROPIC_API_KEY={key}"
    codex = [
        f"model = {quoted}",
        'model_provider = "sgl_ext"',
        "",
        "[model_providers.sgl_ext]",
        'name = "sgl-ext"',
        f'base_url = "{url}/v1"',
        'wire_api = "responses"',
    ]
    codex += [f'env_key = "{_KEY_VARIABLE}"'] if needs_key else []
    start = f"{_KEY_VARIABLE}={key} codex" if needs_key else "codex"
    opencode: dict[str, Any] = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"sgl-ext/{model}",
        "provider": {
            "sgl-ext": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{url}/v1", "apiKey": key},
                "models": {model: {}},
            }
        },
    }
    sdk = f'api_key="{key}")'
    return {
        "claude-code": ("Claude Code", f"{claude} claude --model {shlex.quote(model)}"),
        "codex": (
            "Codex: ~/.codex/config.toml, then start it as in the last line",
            "\n".join([*codex, "", start]),
        ),
        "opencode": ("OpenCode: opencode.json", json.dumps(opencode, indent=2)),
        "python": (
            f"The Python SDKs, with model={quoted}",
            f'anthropic.Anthropic(base_url="{url}", {sdk}\n'
            f'openai.OpenAI(base_url="{url}/v1", {sdk}',
        ),
        "curl": (
            "curl",
            f"curl {shlex.quote(url + '/v1/chat/completions')} -H 'content-type: application/json'"
            + (f" -H 'authorization: Bearer {key}'" if needs_key else "")
            + " -d "
            + shlex.quote(
                json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
            ),
        ),
    }
