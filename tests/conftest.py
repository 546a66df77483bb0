"""What several test folders share: the tiny model, starts of real engines, and their marker."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from sgl_ext_cpu.node import FORKING, ROOT, Node, StartNode, local_model, running_node
from sgl_ext_cpu.nursery import Nursery, running_nursery

from sgl_ext.engine.sglang_versions import STAND_INS, installed, put_stand_ins
from tests import gpu_engines
from tests.debian import INSTALL
from tests.gpu_engines import GpuEngines

if TYPE_CHECKING:
    from tests.engine.scheduler.test_event_publisher import Engine

# What is imported until tests begin stays, SGLang too: no collection of garbage looks at it.
gc.disable()

# Every process that a test starts uses the helpers of this checkout.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(ROOT / "launch/cpu"), os.environ.get("PYTHONPATH")))
)
# And reads what an earlier one has compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# What tests import of SGLang runs on the CPU, also on a machine with GPUs: SGLang would load
# kernels for a GPU that it sees. Tests of a GPU start processes that see it again.
GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ |= {"SGLANG_PLATFORM": "sgl_ext_cpu", "CUDA_VISIBLE_DEVICES": ""}

# What engines import of this checkout is imported once, in the nursery.
OURS = ("sgl_ext.engine.hooks", "sgl_ext.engine.plugin", "sgl_ext.engine.scheduler.radix_cache")
# One thread: the model is tiny, and threads that share too few cores wait for each other far longer
# than they work. And it is too small for what a compiler takes.
VARIABLES = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}

ONE_FOR_ALL = pytest.StashKey[Nursery]()

# Engines may be starting beside a property test: its speed is no assertion.
hypothesis.settings.register_profile("sgl_ext", deadline=None, derandomize="CI" in os.environ)
# `make check` tries fewer examples, `make test` all.
hypothesis.settings.register_profile(
    "quick", hypothesis.settings.get_profile("sgl_ext"), max_examples=20
)
hypothesis.settings.load_profile("sgl_ext")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="engines on this machine's GPU")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """A long value is named by its argument, so that every process collects the same names."""
    return argname if isinstance(val, bytes | str) and len(val) > 60 else None


@pytest.fixture(scope="session", autouse=True)
def _stand_ins() -> None:
    """What an older SGLang lacks, as an engine has it from its start."""
    if installed() in STAND_INS:
        with warnings.catch_warnings(action="ignore"):
            put_stand_ins(installed())


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """A test that calls what sets up a process's log leaves the level as it was."""
    root = logging.getLogger()
    level, disabled = root.level, root.manager.disable
    yield
    root.setLevel(level)
    root.manager.disable = disabled


@pytest.fixture(scope="session")
def tiny_model(request: pytest.FixtureRequest) -> Path:
    """The tiny local model, made once a checkout; on a GPU, one for its kernels."""
    return local_model(gpu_engines.MODEL if request.config.getoption("--gpu") else "tiny")


@pytest.fixture(scope="session")
def nursery(request: pytest.FixtureRequest) -> Iterator[Nursery | GpuEngines]:
    """A process that has imported SGLang, for tests of engines without a launcher."""
    if request.config.getoption("--gpu"):
        engines = GpuEngines(GPUS)
        if not engines.count:
            pytest.skip("there is no GPU that torch can use")
        yield engines
        return
    if path := getattr(request.config, "workerinput", {}).get("nursery"):
        yield Nursery(path, VARIABLES)
        return
    with running_nursery(VARIABLES, OURS) as started:
        yield started


@pytest.fixture(scope="session")
def start_node(tiny_model: Path, nursery: Nursery | GpuEngines) -> StartNode:
    """Starts a node of the tiny model: `start_node(log_dir, *flags, environment=...)`.

    Its engines are forked from the nursery unless `from_nursery` is False.
    """
    if isinstance(nursery, GpuEngines):
        pytest.skip("tests of nodes run on the CPU: make test")

    def start(
        log_dir: Path,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        from_nursery: bool = True,
    ) -> AbstractContextManager[Node]:
        forking = {**FORKING, **nursery.environment} if from_nursery else {}
        whole = {**forking, **(environment or {})}
        return running_node(tiny_model, log_dir, *flags, environment=whole)

    return start


@pytest.fixture(scope="session")
def node(start_node: StartNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Two real engines and a balancer in front of them, for tests that do not harm them."""
    with start_node(tmp_path_factory.mktemp("node"), "--instances", "2", "--diagnose") as started:
        yield started


@pytest.fixture(scope="session")
def plain_engine(
    nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine for tests that need no flags of their own and do not harm it."""
    from tests.engine.scheduler.test_event_publisher import running_engine

    log = tmp_path_factory.mktemp("plain") / "engine.log"
    flags = ("--max-total-tokens", "20000", "--tool-call-parser", "qwen25")
    with running_engine(nursery, tiny_model, log, *flags) as started:
        yield started


@pytest.fixture(scope="session")
def engine(plain_engine: Engine) -> Engine:
    """A module that needs another one has a fixture of this name."""
    return plain_engine


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All processes of pytest-xdist fork engines from one nursery; it imports for the first."""
    if node.config.getoption("--gpu"):
        return
    if ONE_FOR_ALL not in node.config.stash:
        resources = ExitStack()
        node.config.add_cleanup(resources.close)
        shared = resources.enter_context(running_nursery(VARIABLES, OURS))
        node.config.stash[ONE_FOR_ALL] = shared
    node.workerinput["nursery"] = node.config.stash[ONE_FOR_ALL].path


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Ends with what was skipped, and the command that installs what it waits for."""
    skipped = terminalreporter.stats.get("skipped", ())
    if line := skips_line([str(report.longrepr[2]) for report in skipped]):
        terminalreporter.write_line(line)


def skips_line(reasons: list[str]) -> str:
    """What was skipped, by its reason, and one command for all of Debian's packages; "" if nothing
    was."""
    if not reasons:
        return ""
    packages: dict[str, None] = {}
    others: Counter[str] = Counter()
    for reason in (one.removeprefix("Skipped: ") for one in reasons):
        before, install, names = reason.partition(INSTALL)
        if install:
            packages |= dict.fromkeys(names.split())
        else:
            others[before] += 1
    parts = [f"{reason} ({count})" for reason, count in sorted(others.items())]
    if packages:
        parts.append(f"to run the others: {INSTALL}{' '.join(packages)}")
    return f"{len(reasons)} skipped: {'; '.join(parts)}"


# Every test that starts a real SGLang process does it through one of these fixtures.
STARTS_ENGINES = {"nursery", "start_node", "bench_with_engines"}
# Tests that share one of these run in the same process, so that it is started once.
SHARED_NODES = ("node", "scripted", "plain_engine")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests of real engines, and keep together what pytest-xdist must not split."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & STARTS_ENGINES:
            item.add_marker(pytest.mark.engine)
        if config.pluginmanager.hasplugin("xdist"):
            shared = [name for name in SHARED_NODES if name in fixtures]
            alone = item.nodeid if "bench_with_engines" in fixtures else str(item.path)
            item.add_marker(pytest.mark.xdist_group(shared[0] if shared else alone))
    if hasattr(config, "workerinput"):
        # The longest groups first, so that all processes end at about the same time.
        items.sort(key=_order)


@pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")
def pytest_keep_engines(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let tests of the same kind of engine follow each other: pytest itself orders them by the
    kind's place in each test's own list, and would start some kinds several times."""
    if hasattr(config, "workerinput") and any("@" not in item.nodeid for item in items):
        raise pytest.UsageError("this pytest-xdist does not keep groups of tests together")
    files = {path: number for number, path in enumerate(dict.fromkeys(i.path for i in items))}
    items.sort(key=lambda item: (files[item.path], _kind(item)))


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("numprocesses", None):  # its workers import
        gc.enable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or native modules say at the exit that they leak


def _kind(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("engine", "")) if callspec else ""


def _order(item: pytest.Item) -> tuple[bool, bool]:
    uses_node = "node" in getattr(item, "fixturenames", ())
    return item.get_closest_marker("engine") is None, not uses_node
