"""What each client needs to use a node: variables, a command line, a file of its own.

A file is one that only this command writes, and that the client reads beside its user's own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import tomlkit

KEY_VARIABLE = "SGL_KEY"
"""The variable that holds the key, for clients that let us choose its name."""
PLACE_OF_KEY, NO_KEY = "YOUR_KEY", "any"
# Claude Code takes a smaller one for this one.
_LEAST_COMPACT_WINDOW = 100_000
# Clients ask for up to 32,000 tokens, of a prompt that may fill the rest.
_SMALL_WINDOW = 128_000


@dataclass(frozen=True)
class Node:
    """The node to connect to.

    url: its address.
    model: the name that it serves.
    key: the key that clients send; None if it needs none.
    window_tokens: of the model, prompt and answer together; None if the node does not say.
    """

    url: str
    model: str
    key: str | None = None
    window_tokens: int | None = None


class Start(NamedTuple):
    """A command line, and the variables that it needs."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = {}


class File(NamedTuple):
    """A file below the user's home, and how the client starts with it."""

    path: str
    text: str
    start: Start


@dataclass(frozen=True)
class Client:
    """One client.

    start: how it starts; None if no command starts it.
    file: what can be written for it.
    text: what to show, where there is no command.
    """

    title: str
    start: Start | None = None
    file: File | None = None
    text: str = ""

    @property
    def needs_file(self) -> bool:
        """Whether it does not start without its file."""
        return self.file is not None and self.file.start == self.start


def clients_of(node: Node) -> dict[str, Client]:
    """Every client by its short name."""
    return {
        "claude-code": _claude_code(node),
        "codex": _codex(node),
        "opencode": _opencode(node),
        "qwen-code": _qwen_code(node),
        "aider": _aider(node),
        "python": _python(node),
        "curl": _curl(node),
    }


def _claude_code(node: Node) -> Client:
    settings = {
        "ANTHROPIC_BASE_URL": node.url,
        "ANTHROPIC_AUTH_TOKEN": node.key or NO_KEY,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # It says which requests are a sub-agent's, and how long tools took.
        "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",
    }
    if window := node.window_tokens:
        settings["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(window)
        if window >= _LEAST_COMPACT_WINDOW:
            settings["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(window)
        if window < _SMALL_WINDOW:
            settings["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(window // 4)
    # Without the date, the folder and the like in the system text, all its users share one prefix.
    command = ("claude", "--model", node.model, "--exclude-dynamic-system-prompt-sections")
    document: dict[str, Any] = {"env": settings}
    if node.key is not None:
        others = {k: v for k, v in settings.items() if k != "ANTHROPIC_AUTH_TOKEN"}
        document = {"env": others, "apiKeyHelper": f"printenv {KEY_VARIABLE}"}
    path = ".claude/sgl-ext.json"
    start = Start((*command, "--settings", f"~/{path}"), _key(node))
    return Client("Claude Code", Start(command, settings), File(path, _json(document), start))


def _codex(node: Node) -> Client:
    provider: dict[str, Any] = {"name": "sgl-ext", "base_url": f"{node.url}/v1"}
    provider |= {"wire_api": "responses", "supports_websockets": True}
    document: dict[str, Any] = {"model": node.model, "model_provider": "sgl_ext"}
    if node.window_tokens:
        document["model_context_window"] = node.window_tokens
    if node.key is not None:
        provider["env_key"] = KEY_VARIABLE
    document["model_providers"] = {"sgl_ext": provider}
    start = Start(("codex", "--profile", "sgl-ext"), _key(node))
    return Client(
        "Codex", start, File(".codex/sgl-ext.config.toml", tomlkit.dumps(document), start)
    )


def _opencode(node: Node) -> Client:
    model: dict[str, Any] = {}
    if window := node.window_tokens:
        model["limit"] = {"context": window, "output": min(32_000, window // 4)}
    key = NO_KEY if node.key is None else f"{{env:{KEY_VARIABLE}}}"
    document = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"sgl-ext/{node.model}",
        "provider": {
            "sgl-ext": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{node.url}/v1", "apiKey": key},
                "models": {node.model: model},
            }
        },
    }
    path = ".config/opencode/sgl-ext.json"
    start = Start(("opencode",), {"OPENCODE_CONFIG": f"~/{path}"} | _key(node))
    return Client("OpenCode", start, File(path, _json(document), start))


def _qwen_code(node: Node) -> Client:
    environment = {
        "OPENAI_BASE_URL": f"{node.url}/v1",
        "OPENAI_API_KEY": node.key or NO_KEY,
        "OPENAI_MODEL": node.model,
    }
    if node.window_tokens and node.window_tokens < _SMALL_WINDOW:
        environment["QWEN_CODE_MAX_OUTPUT_TOKENS"] = str(node.window_tokens // 4)
    return Client("Qwen Code", Start(("qwen", "--auth-type", "openai"), environment))


def _aider(node: Node) -> Client:
    environment = {"OPENAI_API_BASE": f"{node.url}/v1", "OPENAI_API_KEY": node.key or NO_KEY}
    command = ("aider", "--model", f"openai/{node.model}")
    if not (window := node.window_tokens):
        return Client("aider", Start(command, environment))
    path = ".aider.sgl-ext.json"
    model = {"litellm_provider": "openai", "mode": "chat", "max_input_tokens": window}
    start = Start((*command, "--model-metadata-file", f"~/{path}"), environment)
    return Client("aider", start, File(path, _json({f"openai/{node.model}": model}), start))


def _python(node: Node) -> Client:
    key = f"api_key={json.dumps(node.key or NO_KEY)})"
    lines = (
        f"anthropic.Anthropic(base_url={json.dumps(node.url)}, {key}",
        f"openai.OpenAI(base_url={json.dumps(f'{node.url}/v1')}, {key}",
    )
    title = f"The Python SDKs, with model={json.dumps(node.model)}"
    return Client(title, text="\n".join(lines))


def _curl(node: Node) -> Client:
    body = {"model": node.model, "messages": [{"role": "user", "content": "Hello"}]}
    headers = ["content-type: application/json"]
    if node.key is not None:
        headers.append(f"authorization: Bearer {node.key}")
    options = [word for header in headers for word in ("-H", header)]
    command = ("curl", f"{node.url}/v1/chat/completions", *options, "-d", json.dumps(body))
    return Client("curl", Start(command))


def _key(node: Node) -> dict[str, str]:
    return {} if node.key is None else {KEY_VARIABLE: node.key}


def _json(document: Any) -> str:
    return json.dumps(document, indent=2) + "\n"
