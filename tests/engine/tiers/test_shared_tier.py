"""Engines with a shared tier that has little room, or none: their answers stay the same."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import requests
from sgl_ext_cpu.nursery import Nursery

from sgl_ext.engine.tiers.page_folder import cost_of
from sgl_ext.settings.shared_tier import FOLDER_VARIABLE, tier_flags
from tests.engine.scheduler.test_event_publisher import Engine, Watch, running_engine, text
from tests.kinds import slow_but_for
from tests.waiting import HANG_S, until

LENGTH, PAGE, MIB = 1500, 16, 1 << 20
FLAGS = ("--enable-hierarchical-cache", "--hicache-ratio", "2", "--page-size", str(PAGE))
_source = random.Random(2)


class Serving:
    """One engine, and the folder of its tier."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.folder = folder

    def ask(self, prompt: list[int]) -> tuple[list[int], int]:
        """The answer, and how many tokens of the prompt were read from the tier."""
        sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = self.engine.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
        details = answer["meta_info"].get("cached_tokens_details") or {}
        return answer["output_ids"], details.get("storage", 0)

    def flush(self) -> None:
        requests.post(f"{self.engine.url}/flush_cache", timeout=HANG_S).raise_for_status()

    def count(self, result: str) -> float:
        name = f'sgl_ext_shared_tier_pages_total{{result="{result}"'
        page = requests.get(f"{self.engine.url}/metrics", timeout=HANG_S).text
        lines = (line for line in page.splitlines() if line.startswith(name))
        return sum(float(line.split()[-1]) for line in lines)

    def used_bytes(self) -> int:
        files = [path for path in self.folder.rglob("*/*") if path.is_file()]
        return sum(cost_of(path.stat().st_size) for path in files)


def new_prompt() -> list[int]:
    return [_source.randrange(20, 900) for _ in range(LENGTH)]


Start = Callable[..., Any]


@pytest.fixture
def start(
    nursery: Nursery, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Start:
    """Starts an engine with a tier of so many bytes in a folder."""

    @contextmanager
    def started(folder: Path, budget_bytes: int) -> Iterator[Serving]:
        monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
        flags = (*FLAGS, *tier_flags(budget_bytes))
        with running_engine(nursery, tiny_model, tmp_path / "log", *flags) as engine:
            yield Serving(engine, folder)
            assert "hit an exception" not in (tmp_path / "log").read_text().lower()

    return started


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs that holds less than one prompt."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize("core", slow_but_for(["rust"], ["rust", "python"]))
def test_a_full_tier_evicts_what_was_used_least_recently(
    start: Start, folder: Path, core: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", core)
    budget = 4 * MIB
    with start(folder, budget) as serving:
        prompts = [new_prompt() for _ in range(6)]
        answers = [serving.ask(prompt)[0] for prompt in prompts]
        until(lambda: serving.count("written") >= len(prompts) * (LENGTH // PAGE))
        assert serving.count("evicted") > 0
        assert 0 < serving.used_bytes() <= budget
        serving.flush()
        again = [serving.ask(prompt) for prompt in reversed(prompts)]
        assert [output for output, _ in reversed(again)] == answers
        assert again[0][1] >= LENGTH - 2 * PAGE, "the last one is there"
        assert again[-1][1] == 0, "and the first one is not"
        assert serving.count("corrupt") == 0


def test_a_full_tmpfs_refuses_pages_and_no_request(start: Start, small_tmpfs: Path) -> None:
    with start(small_tmpfs / "tier", 64 * MIB) as serving:
        prompts = [new_prompt() for _ in range(3)]
        answers = [serving.ask(prompt)[0] for prompt in prompts]
        until(lambda: serving.count("refused") >= len(prompts))
        assert serving.count("written") > 0
        serving.flush()
        assert [serving.ask(prompt)[0] for prompt in prompts] == answers
        assert serving.count("corrupt") == 0


def test_weights_that_change_while_it_serves_end_the_tier(
    start: Start, folder: Path, tiny_model: Path
) -> None:
    with start(folder, 64 * MIB) as serving:
        prompt, new = new_prompt(), new_prompt()
        answer, _ = serving.ask(prompt)
        until(lambda: serving.count("written") >= LENGTH // PAGE)
        serving.engine.post("/update_weights_from_disk", {"model_path": str(tiny_model)})
        before = serving.count("written")
        assert serving.ask(prompt) == (answer, 0), "these may be other weights"
        serving.ask(new)
        assert serving.ask(new)[0] == serving.ask(new)[0]
        assert serving.count("written") == before


def test_what_is_shared_is_announced_with_its_share(start: Start, folder: Path) -> None:
    with start(folder, 64 * MIB) as serving:
        watch = Watch(serving.engine)
        chat = {"role": "user", "content": text(1200)}
        request = {"model": "tiny", "max_tokens": 2, "messages": [chat]}
        serving.engine.post("/v1/chat/completions", request)
        until(lambda: bool(shared_of(watch)))
        assert shares_of(watch), "and again when what was measured differs: test_load_lines.py"
        assert all(0 < share <= 1 for share in shares_of(watch))
        assert [line for line in watch.lines if "machine" in line]
        assert not [line for line in watch.lines if "shared_removed" in line]
        for path in folder.rglob("kv-*/*"):
            path.unlink()
        until(lambda: any("shared_removed" in line for line in watch.lines))


def shared_of(watch: Watch) -> list[str]:
    return [segment for line in watch.lines for segment, *_ in line.get("shared", ())]


def shares_of(watch: Watch) -> list[float]:
    return [line["shared_share"] for line in watch.lines if "shared_share" in line]
