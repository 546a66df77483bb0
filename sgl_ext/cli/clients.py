"""The verb `clients`: how Claude Code, Codex, OpenCode and others connect to a node."""

import json
import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from sgl_ext.cli.node import HERE, Json, Key, Node, NodeError, Url, UsageError, node_at
from sgl_ext.cli.show import console, plain, print_json, warn

# A variable of its user's that would win over one of these, or stand beside it.
_IN_THE_WAY = ("ANTHROPIC_API_KEY",)
CLIENT_KEY_VARIABLE = "SGL_KEY"
"""The variable that holds the key, for clients that let us choose its name."""
PLACE_OF_KEY, NO_KEY = "YOUR_KEY", "any"
# Claude Code takes a smaller one for this one.
_LEAST_COMPACT_WINDOW = 100_000
# Clients ask for up to 32,000 tokens, of a prompt that may fill the rest.
_SMALL_WINDOW = 128_000


@dataclass(frozen=True)
class Connection:
    """The node to connect to.

    url: its address.
    model: the name that it serves.
    key: the key that clients send; None if it needs none.
    window_tokens: of the model, prompt and answer together; None if the node does not say.
    small: the model for what a client has a small one for; "": the same.
    """

    url: str
    model: str
    key: str | None = None
    window_tokens: int | None = None
    small: str = ""


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


def clients(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Only this one, such as codex.",
            autocompletion=lambda: list(clients_of(Connection("", ""))),
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGUMENTS", help="With --run: further arguments of the client."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model. Default: the node's first.")
    ] = None,
    small: Annotated[
        str | None,
        typer.Option("--small-model", metavar="NAME", help="For titles, searches and the like."),
    ] = None,
    url: Url = HERE,
    key: Key = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write its configuration into a file of its own.")
    ] = False,
    run: Annotated[bool, typer.Option("--run", help="Start it, connected to the node.")] = False,
    as_json: Json = False,
) -> None:
    """Print, write or use what connects a client such as Claude Code or Codex to the node."""
    if name is None and (write or run):
        raise UsageError("clients: --write and --run need the client's NAME")
    if arguments and not run:
        raise UsageError("clients: ARGUMENTS are for --run")
    node = node_at(url, key)
    card, needs_key = node.model(model), _needs_key(node)
    # A key is passed on to what is started, and never printed or written.
    shown_key = node.key if run else PLACE_OF_KEY
    window = card.get("context_length")
    known = clients_of(
        Connection(
            node.url,
            card["id"],
            shown_key if needs_key else None,
            window if isinstance(window, int) else None,
            "" if (own := small or small_model(node, card["id"])) == card["id"] else own,
        )
    )
    if name is not None and name not in known:
        raise UsageError(f"clients: {name}: must be one of {', '.join(known)}")
    if name is not None and run:
        _run(name, known[name], arguments or [])
    elif name is not None and write:
        _write(name, known[name])
    else:
        chosen = known if name is None else {name: known[name]}
        _show(node.url, card["id"], chosen, needs_key=needs_key, as_json=as_json)


# Claude Code's own name for a small model: an alias for it says which one that is.
_SMALL_NAME = "claude-haiku-4-5"


def small_model(node: Node, model: str) -> str:
    """The model that the node has for small tasks: that of the alias for Claude Code's, or else
    the second; "" if it has one only."""
    try:
        meant = node.get(f"/v1/models/{_SMALL_NAME}").get("parent")
        if isinstance(meant, str):
            return meant
    except (NodeError, AttributeError):
        pass  # no alias takes this name
    try:
        names = [card["id"] for card in node.get("/v1/models")["data"] if not card.get("parent")]
    except (NodeError, LookupError, TypeError, AttributeError):
        return ""
    return next((name for name in map(str, names) if name != model), "")


def _needs_key(node: Node) -> bool:
    """Whether clients of the node need a key."""
    if node.key is None:
        return False  # it has shown its models without one
    try:
        Node(node.url).get("/v1/models")
    except NodeError as error:
        return error.status == 401
    return False


def _show(
    url: str, model: str, chosen: dict[str, Client], *, needs_key: bool, as_json: bool
) -> None:
    if as_json:
        rows = [
            {"name": name, "how": _how(each), "file": f"~/{each.file.path}" if each.file else None}
            for name, each in chosen.items()
        ]
        print_json({"address": url, "model": model, "needs_key": needs_key, "clients": rows})
        return
    shown = console()
    for client in chosen.values():
        shown.print(client.title, style="bold")
        for line in _how(client).splitlines():
            # Whole lines, as they are copied from here.
            shown.print(f"  {plain(line)}", soft_wrap=True)
        shown.print()


def _how(client: Client) -> str:
    """What to write and to run, as it can be copied."""
    if client.start is None:
        return client.text
    line = _line(client.start)
    if client.file is None or not client.needs_file:
        return line
    return f"# ~/{client.file.path}\n{client.file.text}\n{line}"


def _line(start: Start) -> str:
    """A shell's line."""
    variables = [f"{name}={_word(value)}" for name, value in start.environment.items()]
    return " ".join([*variables, *map(_word, start.command)])


def _word(text: str) -> str:
    """A word of a shell's line. A path in the home stays one."""
    return f"~/{shlex.quote(text[2:])}" if text.startswith("~/") else shlex.quote(text)


def _write(name: str, client: Client) -> None:
    """Writes the client's file. Raises UsageError."""
    if client.file is None:
        raise UsageError(f"clients: {name} reads no file of its own; --run starts it")
    shown = console()
    shown.print(plain(f"Written: {_put(client.file)}"), soft_wrap=True)
    shown.print(plain(f"Start it: {_line(client.file.start)}"), soft_wrap=True)


def _put(file: File) -> Path:
    """Writes a file below the home. Raises UsageError if that fails."""
    path = Path.home() / file.path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)
    except OSError as error:
        raise UsageError(f"clients: {path}: {error.strerror or error}") from None
    return path


def _run(name: str, client: Client, arguments: list[str]) -> None:
    """Becomes the client. Raises UsageError if it is not installed."""
    if client.start is None:
        raise UsageError(f"clients: {name} is not started by a command")
    program = shutil.which(client.start.command[0])
    if program is None:
        raise UsageError(f"clients: {client.start.command[0]} is not installed, or not on the PATH")
    if client.file is not None and client.needs_file:
        warn(f"clients: written: {_put(client.file)}")
    ours = {variable: _at_home(value) for variable, value in client.start.environment.items()}
    theirs = {k: v for k, v in os.environ.items() if k not in _IN_THE_WAY}
    words = [*map(_at_home, client.start.command), *arguments]
    os.execve(program, words, theirs | ours)


def _at_home(text: str) -> str:
    return str(Path.home() / text[2:]) if text.startswith("~/") else text


def clients_of(node: Connection) -> dict[str, Client]:
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


def _claude_code(node: Connection) -> Client:
    settings = {
        "ANTHROPIC_BASE_URL": node.url,
        "ANTHROPIC_AUTH_TOKEN": node.key or NO_KEY,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # It says which requests are a sub-agent's, and how long tools took.
        "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",
        # People pause for longer than five minutes, and their sub-agents do not.
        "CLAUDE_CODE_PROMPT_CACHE_TTL": "1h",
        "CLAUDE_CODE_SUBAGENT_PROMPT_CACHE_TTL": "5m",
    }
    if node.small:
        settings["ANTHROPIC_DEFAULT_HAIKU_MODEL"] = node.small
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
        document = {"env": others, "apiKeyHelper": f"printenv {CLIENT_KEY_VARIABLE}"}
    path = ".claude/sgl-ext.json"
    start = Start((*command, "--settings", f"~/{path}"), _key(node))
    return Client("Claude Code", Start(command, settings), File(path, _json(document), start))


def _codex(node: Connection) -> Client:
    import tomlkit

    provider: dict[str, Any] = {"name": "sgl-ext", "base_url": f"{node.url}/v1"}
    provider |= {"wire_api": "responses", "supports_websockets": True}
    document: dict[str, Any] = {"model": node.model, "model_provider": "sgl_ext"}
    if node.window_tokens:
        document["model_context_window"] = node.window_tokens
    if node.key is not None:
        provider["env_key"] = CLIENT_KEY_VARIABLE
    document["model_providers"] = {"sgl_ext": provider}
    # Its feature `memories` asks for models by names of its own.
    document["memories"] = dict.fromkeys(
        ("extract_model", "consolidation_model"), node.small or node.model
    )
    start = Start(("codex", "--profile", "sgl-ext"), _key(node))
    return Client(
        "Codex", start, File(".codex/sgl-ext.config.toml", tomlkit.dumps(document), start)
    )


def _opencode(node: Connection) -> Client:
    model: dict[str, Any] = {}
    if window := node.window_tokens:
        model["limit"] = {"context": window, "output": min(32_000, window // 4)}
    key = NO_KEY if node.key is None else f"{{env:{CLIENT_KEY_VARIABLE}}}"
    document: dict[str, Any] = {
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
    if node.small:
        document["small_model"] = f"sgl-ext/{node.small}"
        document["provider"]["sgl-ext"]["models"][node.small] = {}
    path = ".config/opencode/sgl-ext.json"
    start = Start(("opencode",), {"OPENCODE_CONFIG": f"~/{path}"} | _key(node))
    return Client("OpenCode", start, File(path, _json(document), start))


def _qwen_code(node: Connection) -> Client:
    environment = {
        "OPENAI_BASE_URL": f"{node.url}/v1",
        "OPENAI_API_KEY": node.key or NO_KEY,
        "OPENAI_MODEL": node.model,
    }
    if node.window_tokens and node.window_tokens < _SMALL_WINDOW:
        environment["QWEN_CODE_MAX_OUTPUT_TOKENS"] = str(node.window_tokens // 4)
    command = ("qwen", "--auth-type", "openai")
    if not node.small:
        return Client("Qwen Code", Start(command, environment))
    # It uses a fast model only if its settings list it. Those of a user win over these.
    listed = {"baseUrl": f"{node.url}/v1", "envKey": "OPENAI_API_KEY"}
    models = [{"id": name, "name": name, **listed} for name in (node.model, node.small)]
    document = {"fastModel": node.small, "modelProviders": {"openai": models}}
    path = ".qwen/sgl-ext.json"
    start = Start(command, environment | {"QWEN_CODE_SYSTEM_DEFAULTS_PATH": f"~/{path}"})
    return Client("Qwen Code", start, File(path, _json(document), start))


def _aider(node: Connection) -> Client:
    environment = {"OPENAI_API_BASE": f"{node.url}/v1", "OPENAI_API_KEY": node.key or NO_KEY}
    command: tuple[str, ...] = ("aider", "--model", f"openai/{node.model}")
    if node.small:
        command += ("--weak-model", f"openai/{node.small}")
    if not (window := node.window_tokens):
        return Client("aider", Start(command, environment))
    path = ".aider.sgl-ext.json"
    model = {"litellm_provider": "openai", "mode": "chat", "max_input_tokens": window}
    start = Start((*command, "--model-metadata-file", f"~/{path}"), environment)
    return Client("aider", start, File(path, _json({f"openai/{node.model}": model}), start))


def _python(node: Connection) -> Client:
    key = f"api_key={json.dumps(node.key or NO_KEY)})"
    lines = (
        f"anthropic.Anthropic(base_url={json.dumps(node.url)}, {key}",
        f"openai.OpenAI(base_url={json.dumps(f'{node.url}/v1')}, {key}",
    )
    title = f"The Python SDKs, with model={json.dumps(node.model)}"
    return Client(title, text="\n".join(lines))


def _curl(node: Connection) -> Client:
    body = {"model": node.model, "messages": [{"role": "user", "content": "Hello"}]}
    headers = ["content-type: application/json"]
    if node.key is not None:
        headers.append(f"authorization: Bearer {node.key}")
    options = [word for header in headers for word in ("-H", header)]
    command = ("curl", f"{node.url}/v1/chat/completions", *options, "-d", json.dumps(body))
    return Client("curl", Start(command))


def _key(node: Connection) -> dict[str, str]:
    return {} if node.key is None else {CLIENT_KEY_VARIABLE: node.key}


def _json(document: Any) -> str:
    return json.dumps(document, indent=2) + "\n"
