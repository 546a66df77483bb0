"""`make gpu-report`: its steps, the choice of a model, its verdict on equality, and the whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from sgl_ext_cpu.model import SHAPES
from sgl_ext_cpu.node import FORKING, ROOT
from sgl_ext_cpu.nursery import Nursery

from bench.gpu import __main__ as report_module
from bench.gpu import machine as machine_module
from bench.gpu.__main__ import STEPS
from bench.gpu.equality import explanation, unexplained
from bench.gpu.groups import GROUPS
from bench.gpu.machine import Machine, find_machine, freest, needed_bytes, with_model
from bench.gpu.page import page
from bench.lib.engines import engine_parser
from bench.lib.generate import Load
from bench.report.steps import Result, Step, held, run_step
from sgl_ext.node.hardware import Hardware
from sgl_ext.settings.schema import LaunchSettings, SettingsError
from tests.waiting import until

GIB = 1 << 30
EQUAL = {"stock again": 0, "stock, crowded": 0, "ours": 0, "ours, crowded": 0}
H200 = {"multiplies": True, "free_bytes": 139 * GIB, "capability": [9, 0]}


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> str:
    """The name of a module with this code, which a step's process can run."""
    (folder / "made_step.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ["PYTHONPATH"]]))
    return "made_step"


def test_a_step_ends_with_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys\nprint('before')\nprint('{\"figure\": 3}')\n"
    result = run_step(Step("one", module(tmp_path, monkeypatch, code)), tmp_path / "logs", 60)
    assert (result.status, result.figures, result.why) == ("ok", {"figure": 3}, "")


def test_a_step_that_fails_gives_its_reason_and_its_engines_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs"
    (logs / "ours").mkdir(parents=True)
    (logs / "ours" / "engine-0.log").write_text("first\nout of memory\n")
    name = module(tmp_path, monkeypatch, "import sys\nsys.exit('broken invariant: seven')\n")
    result = run_step(Step("one", name), logs, 60)
    assert (result.status, result.why) == ("failed", "broken invariant: seven")
    assert "==> ours/engine-0.log\nfirst\nout of memory" in result.log_end


ENGINE_FAILS = """\
log = '''[2026-01-02 03:04:05] Scheduler hit an exception: Traceback (most recent call last):
  File "layers.py", line 36, in <module>
    import cutlass
ModuleNotFoundError: No module named 'cutlass'

[2026-01-02 03:04:05] kill_process_tree called: parent_pid=17'''
raise RuntimeError("python -m sglang.launch_server did not start:\\n" + log)
"""


def test_a_step_whose_engine_failed_gives_the_engine_s_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_step(Step("one", module(tmp_path, monkeypatch, ENGINE_FAILS)), tmp_path / "logs")
    assert result.why == "ModuleNotFoundError: No module named 'cutlass'"
    said = "raise RuntimeError('did not start:\\n  OSError: no disk\\nIts whole log: a.log')"
    result = run_step(Step("one", module(tmp_path, monkeypatch, said)), tmp_path / "logs")
    assert result.why == "OSError: no disk", "the log's path differs between steps"


def test_a_step_without_figures_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_step(Step("one", module(tmp_path, monkeypatch, "")), tmp_path / "logs", 60)
    assert (result.status, result.why) == ("failed", "it ended with status 0 and no message")


@pytest.mark.long
def test_a_step_past_its_time_is_interrupted_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "try:\n    time.sleep(600)\nfinally:\n    print('ended', flush=True)\n"
    )
    name = module(tmp_path, monkeypatch, code)
    result = run_step(Step("one", name, limit_s=3), tmp_path / "logs", 60)
    assert (result.status, result.why) == ("failed", "it did not end within 3 s")
    child, ended = (tmp_path / "logs" / "output.log").read_text().split()
    assert ended == "ended"
    until(lambda: not psutil.pid_exists(int(child)) or is_zombie(int(child)), 10)


HOLDING = """\
import sys, threading
from pathlib import Path
Path(sys.argv[1]).write_text("{}")
try:
    threading.Event().wait()
except KeyboardInterrupt:
    print("ended")
"""


def test_what_steps_share_runs_until_the_block_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "running.json"
    step = Step("start", module(tmp_path, monkeypatch, HOLDING), (str(written),))
    with held(step, tmp_path / "logs", 60, written) as result:
        assert result.status == "ok"
        assert (tmp_path / "logs" / "output.log").read_text() == ""
    assert (tmp_path / "logs" / "output.log").read_text() == "ended\n"


def test_a_start_that_fails_gives_its_reason_and_the_block_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step("start", module(tmp_path, monkeypatch, "raise SystemExit('no memory')"))
    with held(step, tmp_path / "logs", 60, tmp_path / "running.json") as result:
        assert (result.status, result.why) == ("failed", "no memory")


def is_zombie(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_no_step_starts_when_the_time_is_used_up(tmp_path: Path) -> None:
    result = run_step(Step("one", "made_step"), tmp_path / "logs", 0.5)
    assert (result.status, result.why) == ("not run", "the time of the whole report was used up")
    assert not (tmp_path / "logs").exists()


def test_the_model_is_the_largest_that_fits() -> None:
    gpu = Machine("0", variable="HIP_VISIBLE_DEVICES")
    large = Machine("0", "8b-config", "2b-config", "HIP_VISIBLE_DEVICES")
    assert with_model(gpu, H200) == large
    assert with_model(gpu, {**H200, "free_bytes": 79 * GIB}).model == "2b-config"
    assert with_model(gpu, {**H200, "free_bytes": 40 * GIB}).model == "small-config"
    assert with_model(gpu, H200, "2b-config").model == "2b-config"
    assert with_model(gpu, {**H200, "capability": [10, 0]}).deterministic == "triton"
    assert with_model(Machine(None), {}) == Machine(None, "tiny")
    with pytest.raises(LookupError, match="engines of 8b-config need"):
        with_model(gpu, {**H200, "free_bytes": 79 * GIB}, "8b-config")


def test_the_memory_of_all_groups_counts() -> None:
    weights = 2 * SHAPES["8b-config"].weight_bytes + 3 * SHAPES["2b-config"].weight_bytes
    caches = 2 * 128_000 * SHAPES["8b-config"].token_bytes
    assert weights + caches < needed_bytes("8b-config", "2b-config") < 139 * GIB


def test_engines_of_a_group_have_its_sizes_and_what_was_given(tmp_path: Path) -> None:
    gpu, narrow, judge = Machine("0", "8b-config", "2b-config"), GROUPS["narrow"], GROUPS["tiered"]
    text = gpu.config(narrow, {"attention-backend": "triton"})
    found = tomllib.loads(text)["engine"]
    assert found["max-total-tokens"] == narrow.pool_tokens
    assert found["max-running-requests"] == found["cuda-graph-max-bs-decode"] == narrow.slots
    assert found["attention-backend"] == "triton"
    assert gpu.model_of(GROUPS["wide"]) == "8b-config"
    assert gpu.model_of(narrow) == "2b-config"
    assert gpu.model_of(judge) == "small-config"
    assert tomllib.loads(gpu.config(judge))["engine"]["enable-deterministic-inference"]
    on_cpu = tomllib.loads(Machine(None).config(judge))
    assert on_cpu["launch"]["platform"] == "cpu"
    assert "enable-deterministic-inference" not in on_cpu["engine"]


def test_a_gpu_that_others_fill_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(LookupError, match=r"GPU 3 has 2\.0 GiB free.*CUDA_VISIBLE_DEVICES"):
        with_model(Machine("3"), {**H200, "free_bytes": 2 * GIB})


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"error": "CUDA error: no kernel image"}, "no kernel image"),
        ({"cuda_version": None, "is_cuda_available": False}, "torch is built for CUDA None"),
        ({}, "the environment is not known"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_an_error_and_no_cpu_run(
    found: dict[str, Any], why: str
) -> None:
    with pytest.raises(LookupError, match=why):
        with_model(Machine("0"), found)


def test_the_gpu_with_the_most_free_memory_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"0": 3 * GIB, "1": 80 * GIB, "2": 5 * GIB}
    monkeypatch.setattr(machine_module, "free_gpu_memory", lambda: free)
    assert freest(("0", "1", "2")) == "1"
    assert freest(("MIG-a", "MIG-b")) == "MIG-a"
    assert find_machine(lambda _: Hardware(("0", "1"))) == Machine("1")
    assert find_machine(lambda _: Hardware((), "sgl_ext_cpu")) == Machine(None)


def test_a_machine_with_gpus_that_cannot_be_used_is_no_machine_without_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: LaunchSettings) -> Hardware:
        raise SettingsError("GPUs cannot be used")

    monkeypatch.setattr(machine_module.shutil, "which", lambda _: None)
    assert find_machine(fail) == Machine(None)
    monkeypatch.setattr(machine_module.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    with pytest.raises(SettingsError):
        find_machine(fail)


def test_a_gpu_s_engines_download_nothing_and_draw_their_weights() -> None:
    found = Machine("2", "8b-config").environment
    assert found["CUDA_VISIBLE_DEVICES"] == "2"
    assert found["HF_HUB_OFFLINE"] == "1"
    assert found["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "sgl_ext_cpu.models"
    assert not FORKING.items() & found.items(), "CUDA does not survive a fork"


def test_answers_of_ours_may_differ_only_where_stocks_do() -> None:
    assert unexplained(EQUAL) == []
    assert unexplained({**EQUAL, "ours": 1}) == ["ours"]
    assert unexplained({**EQUAL, "ours, crowded": 2}) == ["ours, crowded"]
    assert unexplained({**EQUAL, "ours, crowded": 2, "stock, crowded": 1}) == []
    assert "token for token" in explanation(EQUAL)
    assert "do not differ from each other" in explanation({**EQUAL, "ours": 1})
    assert "cannot be judged" in explanation({**EQUAL, "ours": 1, "stock again": 1})
    crowded = {**EQUAL, "ours, crowded": 2, "stock, crowded": 1}
    assert "depend on the batch" in explanation(crowded)


def test_interactive_requests_come_in_shares_of_what_the_batch_takes() -> None:
    from bench.lib.texts import Texts

    load = Load(2, (10, 10), (10, 2), (0.25, 0.5))
    times = [one.at_s for one in load.requests(Texts(), "one", batch_s=8.0)]
    assert times == [0.0, 0.0, 2.0, 4.0]


def test_the_page_says_what_failed_and_that_it_is_a_cpu_run() -> None:
    steps = [
        Result(
            "environment", "failed", 1.0, why="torch | broke", log_end="==> a.log\nend"
        ).document(),
        Result(
            "fanout", "ok", 2.0, {"bench": "fanout", "arms": {"ours": {"ttft_p50_ms": 3}}}
        ).document(),
    ]
    report = {"began": "today", "seconds": 3.0, "model": "tiny"}
    found = page({**report, "is_cpu": True, "steps": steps})
    assert found.startswith("# CPU report\n\n**This is a run on the CPU platform")
    assert "failed: environment." in found
    assert "| environment | failed | 1 | torch \\| broke |" in found
    assert "| arms.ours.ttft_p50_ms | 3 |" in found
    assert "==> a.log" in found
    assert page({**report, "is_cpu": False, "steps": steps}).startswith("# GPU report\n\n`make")


def options(folder: Path, *names: str, **given: Any) -> Any:
    """The options of a run of these steps, or of all."""
    return SimpleNamespace(
        **{
            **{"folder": folder, "only": names or tuple(STEPS), "minutes": 10.0},
            **{"keep": False, "resume": False, **given},
        }
    )


MODELS = {"tiny": Path("tiny"), "small-config": Path("small-config")}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps that a report ran, starts of engines with them; each ends well."""
    seen: list[Step] = []

    def note(step: Step, *_: object) -> Result:
        seen.append(step)
        return Result(step.name, "ok")

    @contextmanager
    def hold(step: Step, *_: object, **__: object) -> Iterator[Result]:
        yield note(step)

    monkeypatch.setattr(report_module, "run_step", note)
    monkeypatch.setattr(report_module, "held", hold)
    return seen


@pytest.mark.parametrize(("gpu", "size"), [("0", "brief"), (None, "smallest")])
def test_each_step_is_given_what_its_module_takes(
    tmp_path: Path, ran: list[Step], gpu: str | None, size: str
) -> None:
    machine = Machine(gpu, "small-config", "small-config")
    run = report_module.Run(options(tmp_path), is_cpu=gpu is None)
    report_module.measure(run, machine, MODELS, {}, {})
    left_out = () if gpu else ("equality_deterministic",)
    starts = {f"start_{STEPS[name].group}" for name in STEPS if name not in left_out}
    assert {step.name for step in ran[: len(starts)]} == starts
    expected = [name for name in STEPS if name not in left_out]
    assert [step.name for step in ran[len(starts) :]] == expected
    for step in ran:
        module = import_module(step.module)
        parser = engine_parser(None)
        parser.add_argument("--group")
        parser.add_argument("--written", type=Path)
        given = parser.parse_args(step.flags)
        assert given.size in getattr(module, "PLANS", (size,))
        assert given.size == size
        assert given.batch_variant == (gpu is not None)
        assert given.config.exists()
        if step.name in STEPS:
            started = next(one for one in ran if one.name == f"start_{STEPS[step.name].group}")
            assert str(given.running) in started.flags


def test_no_step_takes_all_of_a_lease() -> None:
    assert report_module._STEP_S <= 9 * 60


def test_only_the_groups_of_the_named_steps_start(tmp_path: Path, ran: list[Step]) -> None:
    run = report_module.Run(options(tmp_path, "equality", "priority"), is_cpu=True)
    report_module.measure(run, Machine(None), MODELS, {}, {})
    assert [step.name for step in ran] == ["start_narrow", "equality", "priority"]


def test_what_shares_engines_that_did_not_start_is_not_run(
    tmp_path: Path, ran: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    well = report_module.held

    @contextmanager
    def hold(step: Step, *given: Any, **more: Any) -> Iterator[Result]:
        if step.name == "start_wide":
            yield Result(step.name, "failed", why="no nvcc")
            return
        with well(step, *given, **more) as result:
            yield result

    monkeypatch.setattr(report_module, "held", hold)
    run = report_module.Run(options(tmp_path, "facts", "equality"), is_cpu=True)
    report_module.measure(run, Machine(None), MODELS, {}, {})
    found = {name: (result.status, result.why) for name, result in run.results.items()}
    assert found["start_wide"] == ("failed", "no nvcc")
    assert found["facts"] == ("not run", "its engines did not start: no nvcc")
    assert found["equality"][0] == "ok"


def test_a_resumed_report_keeps_what_ended_well_and_runs_the_rest(
    tmp_path: Path, ran: list[Step]
) -> None:
    first = report_module.Run(options(tmp_path), is_cpu=True)
    first.note(Result("equality", "ok", 3.0))
    first.note(Result("priority", "failed", 4.0, why="no memory"))
    run = report_module.Run(options(tmp_path, "equality", "priority", resume=True), is_cpu=True)
    report_module.measure(run, Machine(None), MODELS, {}, {})
    assert [step.name for step in ran] == ["start_narrow", "priority"]
    steps = json.loads((tmp_path / "report.json").read_text())["steps"]
    assert {step["name"]: step["status"] for step in steps} == {
        "equality": "ok", "start_narrow": "ok", "priority": "ok",
    }  # fmt: skip


def test_engines_that_were_kept_are_used_again_and_then_end(
    tmp_path: Path, ran: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = subprocess.Popen(["sleep", "600"], start_new_session=True)
    written = tmp_path / "start_narrow" / "running.json"
    written.parent.mkdir()
    arm = {"url": "http://127.0.0.1:1", "engines": [], "log_dir": "."}
    written.write_text(json.dumps({"stock": arm, "start_s": 1.0, "process": engines.pid}))
    monkeypatch.setattr(report_module, "is_healthy", lambda _: True)
    for is_kept in (True, False):
        given = options(tmp_path, "equality", resume=True, keep=is_kept)
        run = report_module.Run(given, is_cpu=True)
        run.results.clear()
        report_module.measure(run, Machine(None), MODELS, {}, {})
        assert (engines.poll() is None) == is_kept or engines.wait(10) == -signal.SIGKILL
    assert [step.name for step in ran] == ["equality", "equality"]


def test_the_page_is_there_after_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = report_module.Run(options(tmp_path), is_cpu=True)
    run.model = "small-config"
    run.note(Result("equality", "ok", 3.0))
    text = (tmp_path / "report.md").read_text()
    assert "| equality | ok |" in text
    assert "small-config" in text


@pytest.mark.long
def test_gpus_that_cannot_be_used_fail_the_report_and_nothing_runs_on_the_cpu(
    tmp_path: Path,
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n[ $1 != -L ] || echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    program.chmod(0o755)
    hidden = ("SGLANG_PLATFORM", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    environ = {name: value for name, value in os.environ.items() if name not in hidden}
    folder = tmp_path / "report"
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--folder", str(folder)],
        cwd=ROOT,
        env={**environ, "PATH": f"{tmp_path}:{environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    text = (folder / "report.md").read_text()
    assert text.startswith("# GPU report")
    assert "failed: model." in text
    assert "GPUs cannot be used" in text
    assert not (folder / "facts").exists()


@pytest.mark.slow
def test_the_report_runs_on_this_machine(tmp_path: Path, nursery: Nursery) -> None:
    """Its cheapest form. The other benches are run by tests of their own."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bench.gpu", "--folder", str(tmp_path)),
            *("--only", "facts", "equality", "fanout"),
        ],
        cwd=ROOT,
        env={**os.environ, **nursery.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    steps = {step["name"]: step for step in report["steps"]}
    assert {name: step["status"] for name, step in steps.items()} == dict.fromkeys(
        ("environment", "start_narrow", "start_wide", "facts", "fanout", "equality"), "ok"
    )
    facts = steps["facts"]["figures"]
    assert facts["made"]["cache class"].endswith(".ExtendedRadixCache")
    assert facts["made"]["page size"] == facts["resolved"]["page_size"] == 1
    assert facts["made"]["overlap scheduling"] is True
    assert facts["resolved"]["load_format"] == "dummy"
    equality = steps["equality"]["figures"]
    assert equality["preempted"]["ours, crowded"] > 0
    assert equality["pinned_tokens"] > 0
    assert set(equality["differing"].values()) == {0}
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# CPU report")
    assert "All answers are equal, token for token." in text
