"""Chromium, of which every test has a window of its own.

Install it with `apt-get install chromium`. Where CI is set, the tests try that themselves.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from tests.debian import require_debian
from tests.waiting import HANG_S

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], uvloop.Loop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of Chromium. Skips the test if there is none."""
    pytest.importorskip("playwright", reason="playwright is not installed: it is in the extra dev")
    require_debian(lambda: _chromium() is not None, "chromium")
    found = _chromium()
    assert found is not None, "else the test was skipped"
    import_module("playwright.async_api").expect.set_options(timeout=HANG_S * 1000)
    return found


def _chromium() -> str | None:
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Window:
    """A window of the browser, and what it was asked to load and refused to.

    page: Playwright's.
    """

    def __init__(self, page: Any) -> None:
        self.page = page
        self.requests: list[str] = []
        self.faults: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", self._note)
        page.on("dialog", lambda dialog: self.faults.append(dialog.message))

    def _note(self, message: Any) -> None:
        is_network = message.text.startswith("Failed to load resource")
        if message.type in ("error", "warning") and not is_network:
            self.faults.append(message.text)


OpenWindow = Callable[..., Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(chromium: str) -> AsyncIterator[Any]:
    from playwright.async_api import async_playwright

    # Any name is this machine.
    flags = ["--no-sandbox", "--host-resolver-rules=MAP * 127.0.0.1"]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=flags)
        yield browser
        await browser.close()


@pytest.fixture
def window(browser: Any) -> OpenWindow:
    """Opens a window: `async with window(url, width=1280, scheme="light") as window`."""

    @asynccontextmanager
    async def open_window(
        url: str, width: int = 1280, scheme: str = "light"
    ) -> AsyncIterator[Window]:
        size = {"width": width, "height": 800}
        context = await browser.new_context(viewport=size, color_scheme=scheme)
        try:
            page = await context.new_page()
            page.set_default_timeout(HANG_S * 1000)
            opened = Window(page)
            await page.goto(url)
            yield opened
        finally:
            await context.close()

    return open_window
