"""Takes the pictures of the page in docs/images: `python -m docs.screenshot`.

It starts a node of three engines on the CPU, lets agents of three teams work on it, and looks at
the page as an operator does. Needs Chromium, and the extra `dev`. `--minutes 1` is a try.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import tempfile
import time
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
from PIL import Image
from playwright.async_api import async_playwright
from sgl_ext_cpu.node import local_model, running_node

from sgl_ext.keys import add_key

IMAGES = Path(__file__).with_name("images")
_KEY = "operator-key-of-a-picture"
_FLAGS = (
    "--instances=3",
    "--diagnose",
    "--max-total-tokens=40000",
    "--max-running-requests=2",
    "--pin-budget=0.4",
)
_LIMITS = """
[tenants.search-team]
requests-per-minute = 600
tokens-per-minute = 400000
[tenants.nightly-ci]
tokens-per-minute = 60000
[tenants.review-bot]
requests-per-minute = 120
"""
_TEAMS = (("search-team", 8, "0"), ("nightly-ci", 8, "-5"), ("review-bot", 3, "10"))
_WORDS = "read the file and test what it returns when a list is empty then write a patch for it"
_WIDTH, _HEIGHT = 1280, 1180


class Agent:
    """Works through one session after another, each a growing conversation."""

    def __init__(self, number: int, key: str, priority: str, http: aiohttp.ClientSession) -> None:
        self._chance = random.Random(number)
        self._team = priority
        self._headers = {"x-api-key": key, "x-sgl-ext-priority": priority}
        self._headers["user-agent"] = ("claude-cli/2.0.14", "my-agent/1.3")[number % 3 == 2]
        self._has_clock = number % 3 == 2
        self._http = http

    async def work(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            await self._session(until_s)

    async def _session(self, until_s: float) -> None:
        headers = {**self._headers, "x-session-id": f"{self._chance.random()}"}
        system = f"You are the agent of {self._team}. " + self._text(700, self._team)
        messages: list[dict[str, Any]] = []
        for _ in range(self._chance.randint(4, 14)):
            if time.monotonic() > until_s:
                return
            messages.append({"role": "user", "content": self._text(self._chance.randint(30, 220))})
            clock = f" It is {datetime.now(UTC):%H:%M:%S}." if self._has_clock else ""
            mark = {} if clock else {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
            body = {
                "model": "tiny",
                "max_tokens": self._chance.randint(16, 90),
                "system": [{"type": "text", "text": system + clock, **mark}],
                "messages": messages,
            }
            async with self._http.post("/v1/messages", json=body, headers=headers) as answer:
                if answer.status == 200:
                    messages.append({"role": "assistant", "content": "I did so."})
                else:
                    messages.pop()
            await asyncio.sleep(self._chance.expovariate(1 / 2))

    def _text(self, words: int, seed: str | None = None) -> str:
        chance = self._chance if seed is None else random.Random(seed)
        return " ".join(chance.choices(_WORDS.split(), k=words))


async def _work(url: str, keys: dict[str, str], until_s: float) -> None:
    async with aiohttp.ClientSession(url) as http, asyncio.TaskGroup() as tasks:
        number = 0
        for team, count, priority in _TEAMS:
            for _ in range(count):
                tasks.create_task(Agent(number, keys[team], priority, http).work(until_s))
                number += 1


async def take(url: str, key: str) -> None:
    """Takes the pictures of a node."""
    IMAGES.mkdir(exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--force-device-scale-factor=1"]
        )
        for scheme in ("light", "dark"):
            page = await browser.new_page(
                viewport={"width": _WIDTH, "height": _HEIGHT}, color_scheme=scheme
            )
            await page.goto(url)
            if key:
                await page.locator("#gate-key").fill(key)
                await page.keyboard.press("Enter")
            await page.locator("#engines tbody tr").first.wait_for()
            await page.wait_for_timeout(1500)
            with Image.open(BytesIO(await page.screenshot())) as picture:
                picture.save(IMAGES / f"page-{scheme}.webp", lossless=True, method=6)
            await page.close()
        await browser.close()


async def _look_at_work(url: str, keys: dict[str, str], span_s: float) -> None:
    working = asyncio.create_task(_work(url, keys, time.monotonic() + span_s))
    await asyncio.sleep(span_s - 10)
    await take(url, _KEY)
    await working


def _run(minutes: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        keys_file, operator = Path(folder, "keys.toml"), Path(folder, "operator")
        keys_file.write_text(_LIMITS)
        operator.write_text(_KEY)
        keys = {team: add_key(keys_file, team)[0] for team, *_ in _TEAMS}
        flags = (*_FLAGS, f"--keys={keys_file}", f"--api-key=file:{operator}")
        with running_node(local_model("tiny"), Path(folder), *flags) as node:
            asyncio.run(_look_at_work(node.url, keys, 60 * minutes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=7, help="how long the agents work")
    parser.add_argument("--url", help="a node that runs already")
    parser.add_argument("--key", default="", help="its operator's key")
    given = parser.parse_args()
    if given.url is None:
        _run(given.minutes)
    else:
        asyncio.run(take(given.url, given.key))


if __name__ == "__main__":
    main()
