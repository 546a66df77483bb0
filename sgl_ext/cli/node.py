"""A running node as the verbs see it: its balancer's HTTP interface, and what may go wrong with it.

It needs no event loop and follows no redirect, so a key goes to the address that was given alone.
"""

import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlsplit

from typer import Option

if TYPE_CHECKING:
    from http.client import HTTPResponse

DEFAULT_URL = "http://127.0.0.1:30000"
KEY_VARIABLE = "SGL_EXT_API_KEY"
_TIMEOUT_S = 30.0
# A live node sends an event each second.
_SILENCE_S = 10.0
# A prompt may wait in the queue before its answer begins.
_ANSWER_S = 600.0
_DONE = b"[DONE]"


class NodeError(Exception):
    """The node said no, or is not there. The message is one line for the person who asked.

    status: of the node's answer; None if there was none.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class UsageError(Exception):
    """The command line is wrong, and the message says how."""


class Node:
    """The node at a URL, with the key to it."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self.key = key
        parts = urlsplit(self.url)
        try:
            self._host, self._port, self._base = parts.hostname or "", parts.port, parts.path
        except ValueError:
            self._host = ""
        if parts.scheme not in ("http", "https") or not self._host:
            raise UsageError(f"--url={url!r}: must be http://HOST:PORT or https://HOST:PORT")
        self._is_tls = parts.scheme == "https"

    def get(self, path: str, timeout_s: float = _TIMEOUT_S) -> Any:
        """The JSON at a path. Raises NodeError."""
        return self._ask("GET", path, timeout_s=timeout_s)

    def model(self, name: str | None = None) -> dict[str, Any]:
        """What it says of the model with this name, or of its first; `id` is the name. Raises
        NodeError."""
        try:
            if name is None:
                card: dict[str, Any] = self.get("/v1/models")["data"][0]
            else:
                card = self.get(f"/v1/models/{quote(name)}")
            return {**card, "id": str(card["id"])}
        except (TypeError, LookupError):
            raise NodeError(f"what answers at {self.url} is no node of sgl-ext") from None

    def post(self, path: str, document: Any = None) -> Any:
        """The JSON answer to a document that is posted. Raises NodeError."""
        return self._ask("POST", path, None if document is None else json.dumps(document).encode())

    def post_text(self, path: str, body: bytes) -> Any:
        """The JSON answer to a body of JSON that is posted as it is. Raises NodeError."""
        return self._ask("POST", path, body)

    def delete(self, path: str) -> Any:
        """The JSON answer to a deletion. Raises NodeError."""
        return self._ask("DELETE", path)

    def events(self, path: str) -> Iterator[Any]:
        """The JSON documents of a stream of server-sent events, until it ends. Raises NodeError."""
        return self._events("GET", path, None, _SILENCE_S)

    def post_events(self, path: str, body: bytes) -> Iterator[Any]:
        """As `events`, of the answer to a body of JSON, for which a queue may let it wait."""
        return self._events("POST", path, body, _ANSWER_S)

    def _events(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> Iterator[Any]:
        with self._answer(method, path, body, timeout_s) as answer:
            if answer.status != 200:
                raise self._refusal(method, path, answer.status, answer.read())
            for line in answer:
                if line.startswith(b"data:") and line[5:].strip() != _DONE:
                    yield self._decoded(line[5:])

    def _ask(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float = _TIMEOUT_S
    ) -> Any:
        with self._answer(method, path, body, timeout_s) as answer:
            text = answer.read()
        if answer.status >= 300:
            raise self._refusal(method, path, answer.status, text)
        return self._decoded(text)

    @contextmanager
    def _answer(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> "Iterator[HTTPResponse]":
        """An answer, whose body is read within. Raises NodeError."""
        # A shell that asks for completions does not wait for it.
        from http.client import HTTPConnection, HTTPException, HTTPSConnection

        headers = {"accept": "application/json, text/event-stream"}
        if body is not None:
            headers["content-type"] = "application/json"
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        kind = HTTPSConnection if self._is_tls else HTTPConnection
        try:
            with closing(kind(self._host, self._port, timeout=timeout_s)) as connection:
                connection.request(method, self._base + path, body, headers)
                yield connection.getresponse()
        except TimeoutError:
            raise NodeError(f"no answer from {self.url} in {timeout_s:g} s") from None
        except (OSError, HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            start = "is it running? Start one: sgl-ext serve --model-path PATH"
            raise NodeError(f"no node answers at {self.url} ({why}): {start}") from None

    def _decoded(self, text: bytes) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            raise NodeError(f"what answers at {self.url} is no node of sgl-ext") from None

    def _refusal(self, method: str, path: str, status: int, text: bytes) -> NodeError:
        message = _message(text)
        where = path.partition("?")[0]
        if status == 401:
            give = f"--key file:PATH or env:VARIABLE, or set {KEY_VARIABLE}"
            what = f"needs a key: give {give}" if self.key is None else "does not accept this key"
            return NodeError(f"{self.url} {what}", status)
        if status in (404, 405) and (message is None or message.startswith(f"{method} {where}: ")):
            other = "it runs another version of sgl-ext, or is no node of sgl-ext"
            return NodeError(f"{self.url} has no {method} {where}: {other}", status)
        return NodeError(f"{self.url}: {message or f'status {status} without a reason'}", status)


def _message(text: bytes) -> str | None:
    """The reason in an error of any protocol; None if there is none."""
    try:
        error = json.loads(text)["error"]
        message = error["message"] if isinstance(error, dict) else error
        return " ".join(message.split())
    except (ValueError, TypeError, LookupError, AttributeError):
        return None


def node_at(url: str, key: str | None) -> Node:
    """The node at a URL, with the key that `key` names, or else that of the environment.

    Raises UsageError if the key cannot be read.
    """
    if key is None:
        return Node(url, os.environ.get(KEY_VARIABLE) or None)
    from sgl_ext.settings.schema import SettingsError
    from sgl_ext.settings.secrets import read_source

    try:
        return Node(url, read_source("--key", key))
    except SettingsError as error:
        raise UsageError(str(error)) from None


Url = Annotated[
    str,
    Option(
        "--url", envvar="SGL_EXT_URL", metavar="URL", help="The node's address.", show_default=True
    ),
]
Key = Annotated[
    str | None,
    Option(
        "--key",
        metavar="SOURCE",
        help=f"Its key: file:PATH or env:VARIABLE. Default: the variable {KEY_VARIABLE}.",
    ),
]
Json = Annotated[bool, Option("--json", help="Print JSON for programs.")]
HERE = DEFAULT_URL
