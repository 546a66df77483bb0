"""The page in Chromium, over a balancer in front of engines that only claim to be busy."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import ClientSession

from sgl_ext.balancer.admin import state
from sgl_ext.reading.usage import Usage
from tests.page.conftest import OpenWindow
from tests.page.fake_node import FakeEngine, FakeNode, fake_node, load, pin
from tests.waiting import HANG_S

expect = pytest.importorskip("playwright.async_api", reason="it is in the extra dev").expect
pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

HOSTILE = '<img src=x onerror="alert(1)">'
# Of an element, the contrast between its text and what is behind it.
CONTRAST = """(node) => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  let behind = node;
  while (channels(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const [a, b] = [getComputedStyle(node).color, getComputedStyle(behind).backgroundColor]
    .map((color) => light(channels(color))).sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}"""


async def assert_readable(page: Any, *selectors: str) -> None:
    """Every text of what is visible stands out from what is behind it."""
    for selector in selectors:
        found = page.locator(f"{selector}:visible")
        contrasts = await found.evaluate_all(f"(all) => all.map({CONTRAST})")
        assert min(contrasts, default=21) >= 4.5, selector


HIDE = """(isHidden) => {
  Object.defineProperty(document, "hidden", { get: () => isHidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
# Of the page.
DASH = "\N{EN DASH}"
KEY = "Operator\N{RIGHT SINGLE QUOTATION MARK}s or admin\N{RIGHT SINGLE QUOTATION MARK}s key"


def table(page: Any, name: str) -> Any:
    return page.get_by_role("table", name=name)


async def test_a_busy_node(window: OpenWindow) -> None:
    engines = [FakeEngine(number, [pin(number)]) for number in range(64)]
    async with fake_node(*engines, FakeEngine(64, is_ready=False), diagnose=True) as node:
        node.remember()
        await node.answer(300)
        for agent in ("", "helper"):
            await node.ask_as_claude_code("team", agent)
        async with window(node.url) as opened:
            page = opened.page
            await expect(page.locator("#connection")).to_have_text("Live")
            await expect(page.locator("#model")).to_have_text("qwen3-coder-30b")
            await expect(page.locator("#now-engines")).to_have_text("64 of 65")
            await expect(table(page, "Engines").locator("tbody tr")).to_have_count(65)
            starting = table(page, "Engines").get_by_role("row", name="starting")
            await expect(starting).to_contain_text(DASH)
            row = table(page, "Engines").locator("tbody tr").first
            await expect(row).to_contain_text("60K of 180K")
            memory = row.get_by_role(
                "img", name="21K tokens pinned, 39K in use, 120K free, of 180K"
            )
            assert await memory.locator(".pinned").evaluate("it => it.offsetWidth") > 0
            await expect(table(page, "Sessions").locator("tbody tr")).to_have_count(200)
            await expect(page.get_by_text("102 more are not shown.")).to_be_visible()
            await expect(page.locator("#pins tbody tr")).to_have_count(64)
            await expect(table(page, "Tenants").locator("tbody tr")).to_have_count(4)
            charts = page.locator("#charts svg")
            await expect(charts).to_have_count(4)
            for number in range(4):
                assert (
                    len(await charts.nth(number).locator("path.line").first.get_attribute("d"))
                    > 999
                )
            label = await charts.first.get_attribute("aria-label")
            assert label.startswith("Hit rate. Hit rate: ")
            await charts.first.hover()
            await expect(page.locator(".reading").first).to_contain_text("%")
            programs = table(page, "Programs").locator("tbody tr")
            await expect(programs).to_have_count(1)
            await expect(programs).to_contain_text("claude-code")
            assert not opened.faults


async def test_an_engine_that_starts(window: OpenWindow, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_node(FakeEngine(0, is_ready=False)) as node:
        (worker,) = node.balancer._services.workers.all
        loading = {"state": "starting", "stage": "loading weights", "progress": 0.4}

        async def children() -> list[dict[str, Any]]:
            return [{"name": "engine-0", "url": worker.url, **loading}]

        monkeypatch.setattr(node.balancer._services.launcher, "children", children)
        async with window(node.url) as opened:
            row = table(opened.page, "Engines").locator("tbody tr")
            await expect(row).to_contain_text("loading weights")
            await expect(row.get_by_role("progressbar")).to_have_js_property("value", 0.4)
            await expect(opened.page.locator("#node")).to_have_text("no engine is ready")


async def test_it_follows_the_node(window: OpenWindow) -> None:
    engine = FakeEngine(0)
    async with fake_node(engine) as node, window(node.url) as opened:
        page = opened.page
        await expect(page.get_by_text("No session sent a request")).to_be_visible()
        await expect(page.get_by_text("Nothing is pinned.")).to_be_visible()
        await expect(page.locator("#divergences")).to_contain_text("No prompt diverges")
        await expect(page.locator("#now-ttft")).to_have_text(DASH)
        await node.answer(1)
        await expect(table(page, "Sessions").locator("tbody tr")).to_have_count(1)
        engine.tell({"load": {**load(0), "running": 77}})
        await expect(table(page, "Engines").get_by_role("cell", name="77")).to_be_visible()
        engine.is_ready = False
        await expect(page.locator("#node")).to_have_text("no engine is ready")


async def test_a_node_without_engines(window: OpenWindow) -> None:
    async with fake_node() as node, window(node.url, width=360) as opened:
        await expect(opened.page.get_by_text("No engine is known yet.")).to_be_visible()
        await expect(opened.page.locator("#now-engines")).to_have_text("0 of 0")
        assert not opened.faults


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_can_be_read_in_light_and_dark(window: OpenWindow, scheme: str) -> None:
    async with (
        fake_node(FakeEngine(0, [pin(0)]), FakeEngine(1, is_ready=False)) as node,
        window(node.url, scheme=scheme) as opened,
    ):
        page = opened.page
        await expect(page.locator("#pins table")).to_be_visible()
        red = await page.evaluate(
            "+getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]"
        )
        assert (red > 128) == (scheme == "light")
        parts = (".note", ".pill", "thead th", "tbody td", "#connection", "button.quiet")
        await assert_readable(page, *parts)


async def test_a_narrow_window_needs_no_scrolling_sideways(window: OpenWindow) -> None:
    async with (
        fake_node(FakeEngine(0, [pin(0)]), FakeEngine(1, is_ready=False)) as node,
        window(node.url, width=360) as opened,
    ):
        await node.answer(5, tenants=("a" * 200,))
        page = opened.page
        await expect(table(page, "Sessions").locator("tbody tr")).to_have_count(5)
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        for region in await page.locator(".scroll:visible").all():
            assert await region.evaluate("it => it.scrollWidth - it.clientWidth") == 0
        button = page.get_by_role("button", name="Delete the pin")
        box = await button.bounding_box()
        assert box["x"] + box["width"] <= 360


@pytest.mark.parametrize("width", [700, 800, 1000])
async def test_a_window_of_middle_width_breaks_no_word_and_needs_no_scrolling(
    window: OpenWindow, width: int
) -> None:
    async with (
        fake_node(FakeEngine(0, [pin(0)])) as node,
        window(node.url, width=width) as opened,
    ):
        await node.answer(5)
        await node.ask_as_claude_code("team", "helper")
        names = {"session-17": "session-17", "review-of-main/agent-17": "review-of-m…/agent-17"}
        names["3f1c9d2e5b1c4b7e9a110c2d3e4f5a6b"] = "3f1c9d2e"
        for name in names:
            await ask_for(node, name)
        page = opened.page
        await expect(page.get_by_text("No request was found.")).to_be_hidden()
        await expect(table(page, "Sessions").locator("tbody tr")).to_have_count(9)
        for shown in names.values():
            await expect(page.locator("#sessions").get_by_text(shown, exact=True)).to_be_visible()
        for region in await page.locator(".scroll:visible").all():
            assert await region.evaluate("it => it.scrollWidth - it.clientWidth") == 0
        for row in await page.locator("#sessions tbody tr", has_text="unknown").all():
            assert "unknown" not in await row.evaluate(WRAPS)


async def test_the_keyboard_deletes_a_pin(window: OpenWindow) -> None:
    one, two = FakeEngine(0, [pin(0), pin(1)]), FakeEngine(1, [pin(0)])
    async with fake_node(one, two) as node, window(node.url) as opened:
        page = opened.page
        await expect(page.locator("#pins tbody tr")).to_have_count(3)
        buttons = page.get_by_role("button", name="Delete the pin")
        name = await buttons.first.get_attribute("aria-label")
        for _ in range(10):
            await page.keyboard.press("Tab")
            if await page.evaluate("document.activeElement.ariaLabel") == name:
                break
        await expect(buttons.first).to_be_focused()
        assert await buttons.first.evaluate("it => getComputedStyle(it).outlineStyle") == "solid"
        # The second thoughts are first.
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("button", name="Keep it")).to_be_focused()
        await page.keyboard.press("Escape")
        await expect(buttons.first).to_be_focused()
        assert one.deleted == two.deleted == []
        await page.keyboard.press("Enter")
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await expect(page.locator("#message")).to_have_text("The pin was deleted.")
        await expect(page.locator("#pins tbody tr")).to_have_count(2)
        assert len(one.deleted + two.deleted) == 1
        await expect(buttons.first).to_be_focused()
        assert not opened.faults


async def test_names_of_clients_stay_text(window: OpenWindow) -> None:
    engine = FakeEngine(0, [pin(0, owner=HOSTILE, session=HOSTILE)])
    engine.model = HOSTILE
    async with fake_node(engine, diagnose=True) as node:
        await node.answer(1, tenants=(HOSTILE,))
        found = {"part": "system", "block": HOSTILE, "kind": HOSTILE, "scope": HOSTILE, "tokens": 9}
        node.diverge(HOSTILE, HOSTILE, found)
        async with window(node.url) as opened:
            page = opened.page
            for name in ("sessions", "pins", "divergences", "tenants"):
                await expect(page.locator(f"#{name}")).to_contain_text("<img src=x")
            await expect(page.locator("#model")).to_have_text(HOSTILE)
            await page.get_by_role("button", name="Delete the pin").click()
            await expect(page.locator("#delete-what")).to_contain_text(HOSTILE)
            assert await page.locator("img").count() == 0
            assert not opened.faults


async def test_it_loads_nothing_from_elsewhere_and_could_not(window: OpenWindow) -> None:
    async with fake_node(FakeEngine(0)) as node, window(node.url) as opened:
        page = opened.page
        await expect(page.locator("#connection")).to_have_text("Live")
        assert {urlsplit(url).netloc for url in opened.requests} == {urlsplit(node.url).netloc}
        assert not opened.faults
        told = await page.evaluate(
            """async () => {
              const told = [];
              addEventListener("securitypolicyviolation",
                (event) => told.push(event.effectiveDirective));
              await fetch("http://elsewhere.test/").catch(() => {});
              const picture = new Image();
              picture.src = "http://elsewhere.test/a.png";
              const wrong = [
                () => document.body.setAttribute("onclick", "window.ran = true"),
                () => (document.body.innerHTML = "<p>"),
              ];
              for (const each of wrong) try { each(); } catch (error) { told.push(error.name); }
              document.body.click();
              await new Promise((resolve) => setTimeout(resolve, 50));
              return { told, ran: window.ran ?? false };
            }"""
        )
        assert {"connect-src", "img-src", "require-trusted-types-for"} <= set(told["told"])
        assert told["told"].count("TypeError") == 2
        assert not told["ran"]


async def test_a_lost_connection_is_told_and_comes_back(window: OpenWindow) -> None:
    engine = FakeEngine(0)
    async with fake_node(engine) as node:
        port = node.balancer.port
        opening = window(node.url)
        opened = await opening.__aenter__()
        await expect(opened.page.locator("#connection")).to_have_text("Live")
    try:
        connection = opened.page.locator("#connection")
        await expect(connection).to_contain_text(
            "Connection lost, trying again. The figures are from"
        )
        await expect(opened.page.locator("#now-engines")).to_be_visible()
        async with fake_node(FakeEngine(0), FakeEngine(1), port=port):
            await expect(connection).to_have_text("Live")
            await expect(opened.page.locator("#now-engines")).to_have_text("2 of 2")
    finally:
        await opening.__aexit__(None, None, None)


async def test_a_refusal_that_passes_is_told(
    window: OpenWindow, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_node(FakeEngine(0)) as node:
        monkeypatch.setattr(state, "MOST_STREAMS", 0)
        async with window(node.url) as opened:
            connection = opened.page.locator("#connection")
            told = "At most 0 live streams may be open, trying again."
            await expect(connection).to_have_text(told)
            monkeypatch.undo()
            await expect(connection).to_have_text("Live")


async def test_nobody_who_looks_is_no_stream(window: OpenWindow) -> None:
    async with fake_node(FakeEngine(0)) as node, window(node.url) as opened:
        await expect(opened.page.locator("#connection")).to_have_text("Live")
        assert node.streams() == 1
        for is_hidden, streams in ((True, 0), (False, 1)):
            await opened.page.evaluate(HIDE, is_hidden)
            async with asyncio.timeout(HANG_S):
                while node.streams() != streams:  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(0.01)


async def test_a_key_is_asked_for_and_stays_in_the_tab(
    window: OpenWindow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGE_KEY", "sesame")
    engine = FakeEngine(0, [pin(0)])
    async with (
        fake_node(engine, api_key="env:PAGE_KEY") as node,
        window(node.url) as opened,
    ):
        page = opened.page
        field = page.get_by_label(KEY)
        await expect(field).to_be_focused()
        await expect(page.locator("#main")).to_be_hidden()
        await page.keyboard.type("wrong")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_have_text("Invalid or missing API key.")
        await expect(field).to_be_focused()
        await page.keyboard.type("sesame")
        await page.keyboard.press("Enter")
        await expect(page.locator("#connection")).to_have_text("Live")
        await page.get_by_role("button", name="Delete the pin").click()
        await page.get_by_role("button", name="Delete", exact=True).click()
        await expect(page.get_by_text("Nothing is pinned.")).to_be_visible()
        assert await page.evaluate("[document.cookie, localStorage.length]") == ["", 0]
        assert "sesame" not in "".join(opened.requests)
        await page.reload()
        await expect(page.locator("#connection")).to_have_text("Live")
        await page.get_by_role("button", name="Forget the key").click()
        await expect(field).to_be_focused()
        assert await page.evaluate("sessionStorage.length") == 0


async def test_without_keys_another_machine_s_name_gets_the_reason(window: OpenWindow) -> None:
    async with fake_node(FakeEngine(0)) as node:
        port = node.balancer.port
        async with window(f"http://gpu-box.test:{port}/") as opened:
            page = opened.page
            await expect(page.get_by_role("alert")).to_contain_text("administration is local")
            tunnel = f"ssh -L {port}:127.0.0.1:{port} gpu-box.test"
            await expect(page.locator("#gate")).to_contain_text(tunnel)
            await expect(page.get_by_label(KEY)).to_be_hidden()


# Of a row, the cells whose text is on several lines; prose and states may be.
WRAPS = """(row) => [...row.cells]
  .filter((cell) => !cell.matches(".text, .state") && cell.offsetParent)
  .filter((cell) => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    const shown = [...range.getClientRects()].filter((rect) => rect.width && rect.height);
    const middle = (rect) => (rect.top + rect.bottom) / 2;
    return shown.some((rect) => middle(rect) > shown[0].bottom || middle(rect) < shown[0].top);
  }).map((cell) => cell.textContent)"""


async def ask_for(node: FakeNode, session: str, count: int = 1) -> None:
    """Requests of a session."""
    async with ClientSession(node.url) as client:
        for _ in range(count):
            usage = {"prompt_tokens": 2254, "completion_tokens": 9}
            usage |= {"prompt_tokens_details": {"cached_tokens": 2076}}  # type: ignore[dict-item]
            body = {"messages": [{"role": "user", "content": "Hi"}], "usage": usage}
            headers = {"x-session-id": session, "x-tenant-id": "alice"}
            async with client.post("/v1/chat/completions", json=body, headers=headers) as answer:
                await answer.read()


@pytest.mark.parametrize("width", [390, 800, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_session_leads_to_what_took_its_requests_their_time(
    window: OpenWindow, width: int, scheme: str
) -> None:
    async with (
        fake_node(FakeEngine(0, [pin(0, session="session-b")])) as node,
        window(node.url, width=width, scheme=scheme) as opened,
    ):
        await ask_for(node, "session-a", 2)
        await ask_for(node, "session-b")
        page = opened.page
        rows = table(page, "Requests").locator("tbody tr")
        await page.locator("#requests").scroll_into_view_if_needed()
        await expect(rows).to_have_count(3)
        await expect(rows.first).to_contain_text(
            "waited 0 ms in the queue and 0 ms behind a prefill"
        )
        await expect(rows.first).to_contain_text("2,076 of 2,254 tokens were cached; first token")
        # By the keyboard, from the session's row.
        link = page.get_by_role("link", name="Requests of the session session-a").first
        await link.focus()
        await page.keyboard.press("Enter")
        await expect(rows).to_have_count(2)
        await expect(page.locator("#requests-title")).to_be_focused()
        await expect(page.get_by_role("searchbox", name="Session")).to_have_value("session-a")
        assert page.url.endswith("#requests?session=session-a")
        parts = ("#requests .note", "#requests a", "#requests td", ".filter label")
        assert await page.evaluate("document.documentElement.scrollWidth") == width
        await assert_readable(page, *parts)
        await page.get_by_role("button", name="Show all").focus()
        await page.keyboard.press("Enter")
        await expect(rows).to_have_count(3)
        assert not opened.faults


async def test_who_was_refused_is_shown_with_the_reason(window: OpenWindow) -> None:
    async with fake_node() as node:
        await ask_for(node, "session-a")
        async with window(f"{node.url}/#requests?status=refused") as opened:
            page = opened.page
            rows = table(page, "Requests").locator("tbody tr")
            await expect(rows).to_have_count(1)
            await expect(rows).to_contain_text("before any engine had it: No engine is ready")
            note = page.locator("#requests [role=status]")
            await expect(note).to_contain_text("No engine is ready")
            assert not opened.faults


async def test_among_a_thousand_sessions_one_is_found_and_the_worst_are_first(
    window: OpenWindow,
) -> None:
    async with fake_node(FakeEngine(0)) as node, window(node.url) as opened:
        activity, now_s = node.balancer._services.activity, time.time()
        for number in range(1100):
            usage = Usage(1000, number % 1000, 100)
            name, ttft_s = f"made-{number:04}", 0.1 if number != 500 else 30.0
            activity.add(now_s - number / 10, "alice", number, "e", 0, usage, ttft_s, name=name)
        page = opened.page
        rows = table(page, "Sessions").locator("tbody tr")
        await expect(rows).to_have_count(200)
        await expect(page.locator("#sessions-count")).to_have_text("1,100")
        await page.get_by_role("searchbox", name="Search").fill("made-0777 alice")
        await expect(rows).to_have_count(1)
        await expect(page.locator("#sessions-note")).to_have_text("1 of 1,100")
        await page.get_by_role("searchbox", name="Search").fill("")
        await page.get_by_role("combobox", name="Sort").select_option("slowest first")
        await expect(rows.first).to_contain_text("30 s")
        await expect(rows).to_have_count(200)
        await page.get_by_role("combobox", name="Sort").select_option("latest first")
        await expect(rows.first).to_contain_text("made-000")
        asked = [each for each in opened.requests if "/sgl_ext/sessions?" in each]
        assert len(asked) < 20, "it asks once in a while"
        assert not opened.faults


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (800, "dark"), (1280, "light")])
async def test_several_models_have_a_table_and_requests_are_found_by_model(
    window: OpenWindow, width: int, scheme: str
) -> None:
    engines = FakeEngine(0), FakeEngine(1)
    engines[1].model = "small"
    async with (
        fake_node(*engines) as node,
        window(f"{node.url}/#requests?model=small", width=width, scheme=scheme) as opened,
    ):
        page = opened.page
        models = table(page, "Models").locator("tbody tr")
        await expect(models).to_have_count(2)
        await expect(models.filter(has_text="small")).to_contain_text("1 of 1")
        async with ClientSession(node.url) as client:
            for model in ("small", "qwen3-coder-30b", "small"):
                turns = [{"role": "user", "content": model}]
                body = {"model": model, "messages": turns, "usage": {"prompt_tokens": 9}}
                async with client.post("/v1/chat/completions", json=body) as answer:
                    assert answer.status == 200
        await expect(page.get_by_role("searchbox", name="Model")).to_have_value("small")
        rows = table(page, "Requests").locator("tbody tr")
        await expect(rows).to_have_count(2, timeout=HANG_S * 1000)
        await page.get_by_role("searchbox", name="Model").fill("")
        await expect(rows).to_have_count(3)
        assert await page.evaluate("document.documentElement.scrollWidth") == width
        if width == 1280:
            for row in await page.locator("#models tr, #requests tr").all():
                assert await row.evaluate(WRAPS) == []
        assert not opened.faults


async def test_a_node_of_one_model_shows_no_models(window: OpenWindow) -> None:
    async with fake_node(FakeEngine(0)) as node, window(node.url) as opened:
        await expect(table(opened.page, "Engines").locator("tbody tr")).to_have_count(1)
        await expect(opened.page.locator("#models")).to_be_hidden()
        await expect(opened.page.get_by_role("searchbox", name="Model")).to_be_hidden()


async def test_at_1280_pixels_no_cell_wraps(window: OpenWindow) -> None:
    engines = [FakeEngine(number, [pin(number)]) for number in range(3)]
    async with fake_node(*engines) as node, window(node.url, width=1280) as opened:
        await node.answer(6)
        await node.ask_as_claude_code("3f1c9d2e-5b1c-4b7e-9a11-0c2d3e4f5a6b", "helper")
        page = opened.page
        await page.locator("#requests").scroll_into_view_if_needed()
        await expect(table(page, "Requests").locator("tbody tr")).to_have_count(
            7, timeout=HANG_S * 1000
        )
        await expect(table(page, "Sessions").locator("tbody tr")).to_have_count(7)
        for row in await page.locator("tbody tr:visible").all():
            assert await row.evaluate(WRAPS) == []


async def test_the_pin_budget_is_a_bar_with_what_was_declined(window: OpenWindow) -> None:
    async with fake_node(FakeEngine(0, [pin(0)])) as node, window(node.url, width=390) as opened:
        page = opened.page
        row = page.locator("#pin-budgets tbody tr")
        await expect(row).to_contain_text("21K of 60K")
        await expect(row).to_contain_text(
            "3: what is pinned is worth more; 1: the prefix is longer"
        )
        await expect(row.get_by_role("img")).to_have_accessible_name(
            "21K of 60K tokens of the pin budget"
        )
        assert not opened.faults


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (800, "light"), (1280, "dark")])
async def test_an_outage_looks_like_one(window: OpenWindow, width: int, scheme: str) -> None:
    engine = FakeEngine(1)
    async with (
        fake_node(FakeEngine(0), engine) as node,
        window(node.url, width=width, scheme=scheme) as opened,
    ):
        page, services = opened.page, node.balancer._services
        await expect(page.locator("#node")).to_have_text("serving")
        await expect(page.locator("#failures")).to_be_hidden()
        engine.is_ready = False
        services.events.add("crashed", "engine-1", "SIGKILL; it restarts in 1 s")
        for number in range(60):
            services.events.add("limit reached", f"tenant-{number}", HOSTILE)
        services.activity.failures.add(time.time(), "No engine is ready.")
        await expect(page.locator("#node")).to_have_text("degraded: 1 of 2 engines ready")
        await expect(page.locator("#now-engines")).to_have_text("1 of 2")
        told = (
            "1 requests refused or failed in the last minute: 1 \N{MULTIPLICATION SIGN} No engine"
        )
        await expect(page.locator("#failures")).to_contain_text(told)
        rows = table(page, "Events").locator("tbody tr")
        await expect(rows.filter(has_text="crashed")).to_contain_text("SIGKILL; it restarts in 1 s")
        await expect(rows.filter(has_text="tenant-59")).to_contain_text("<img src=x")
        for selector in ("#node", "#failures", '#events [data-level="error"]'):
            assert await page.locator(selector).first.evaluate(CONTRAST) >= 4.5, selector
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        region = page.locator("#events").get_by_role("region", name="Events")
        await region.focus()
        await page.keyboard.press("End")
        await expect(region).to_be_focused()
        assert not opened.faults
