"""Two fixtures, with which every answer that a folder's tests get is what the SDKs read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests

from tests.sdk_models import problems

_found: list[tuple[int, str]] = []


@pytest.fixture(scope="session", autouse=True)
def looked_at_answers() -> Iterator[None]:
    """Every answer that a test reads with requests or with an SDK is looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests.Session, "send", _requests_send(requests.Session.send))
        patch.setattr(httpx.Client, "send", _httpx_send(httpx.Client.send))
        yield


@pytest.fixture(autouse=True)
def answers_are_the_sdks(looked_at_answers: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test is answered is what the SDKs read.

    An answer repeats fields of its request, so of wrong requests (`wrong_requests`) only the
    errors are looked at.
    """
    _found.clear()  # what other folders' tests, with servers of their own, were answered
    yield
    only_errors = request.node.get_closest_marker("wrong_requests") is not None
    found = [each for status, each in _found if status >= 400 or not only_errors]
    assert not found, "\n".join(found)


def _look(path: str, status: int, kind: str | None, body: bytes) -> None:
    _found.extend((status, each) for each in problems(path, status, kind or "", body))


def _requests_send(original: Any) -> Any:
    def send(self: requests.Session, request: Any, **options: Any) -> requests.Response:
        answer: Any = original(self, request, **options)
        path, kind = request.path_url.partition("?")[0], answer.headers.get("content-type")
        if not options.get("stream"):
            _look(path, answer.status_code, kind, answer.content)
            return answer
        read = answer.iter_content

        def pieces(*arguments: Any, **options: Any) -> Iterator[bytes]:
            body = b""
            try:
                for piece in read(*arguments, **options):
                    body += piece
                    yield piece
            finally:
                _look(path, answer.status_code, kind, body)

        answer.iter_content = pieces
        return answer

    return send


class _Looked(httpx.SyncByteStream):
    def __init__(self, request: httpx.Request, answer: httpx.Response) -> None:
        self._stream, self._request, self._answer, self._body = answer.stream, request, answer, b""

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:  # type: ignore[union-attr]
            self._body += piece
            yield piece

    def close(self) -> None:
        self._stream.close()  # type: ignore[union-attr]
        kind = self._answer.headers.get("content-type")
        _look(self._request.url.path, self._answer.status_code, kind, self._body)


def _httpx_send(original: Any) -> Any:
    def send(self: httpx.Client, request: Any, *, stream: bool = False, **more: Any) -> Any:
        answer = original(self, request, stream=True, **more)
        answer.stream = _Looked(request, answer)
        if not stream:
            answer.read()
        return answer

    return send
