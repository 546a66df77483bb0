"""SGLang's flags, checked without SGLang."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from sgl_ext_cpu.node import ROOT

from sgl_ext.node import flags
from sgl_ext.node.flags import TABLE, check_addresses, check_flags, ports_beside, why_one_start
from sgl_ext.ports import free_ports
from sgl_ext.settings.schema import LaunchSettings, SettingsError


@pytest.fixture(autouse=True)
def _only_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang in the table's version, and no other plugin."""
    monkeypatch.setattr(flags, "_installed", lambda: json.loads(TABLE.read_text())["sglang"])
    monkeypatch.setattr(flags, "entry_points", lambda group: ())


@pytest.mark.long
def test_the_table_is_that_of_sglangs_parser() -> None:
    code = "import json; from launch.sglang_flags import table; print('\\n', json.dumps(table()))"
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(printed.stdout.splitlines()[-1]) == json.loads(TABLE.read_text())


@pytest.mark.parametrize(
    "argv",
    [
        ["--enable-metrics", "--max-total-tokens", "7", "--mem-fraction-static=0.5"],
        ["--dtype", "float16", "--served-model-name=m", "--lora-paths", "a=b", "c=d"],
        ["--tool-call-parser", "qwen25", "--json-model-override-args", "{}"],
        [],
    ],
)
def test_flags_that_sglang_takes_pass(argv: list[str]) -> None:
    check_flags(argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-runing-requests", "3"], "unknown flag; did you mean --max-running-requests?"),
        (["--instnces=3"], "--instnces: unknown flag; did you mean --instances?"),
        (["--dtype", "floaty"], "--dtype='floaty': unknown; did you mean float?"),
        (
            ["--hicache-write-policy", "write_never"],
            "--hicache-write-policy='write_never': unknown; there are write_back, write_through, ",
        ),
        (["--schedule-policy", "zzz"], "--schedule-policy='zzz': unknown; there are dfs-weight, "),
        (["--max-running-requests", "many"], "--max-running-requests: invalid int value: 'many'"),
        (["--mem-fraction-static"], "--mem-fraction-static: expected one argument"),
        (["--enable-metrics", "stray"], "'stray': belongs to no flag"),
    ],
)
def test_a_flag_that_sglang_would_refuse_is_named_with_the_nearest(
    argv: list[str], message: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        check_flags(argv, ["--instances"])
    assert message in str(refused.value)


def test_another_plugins_choices_pass_unless_they_look_misspelt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = EntryPoint("other", "other:activate", "sglang.srt.plugins")
    monkeypatch.setattr(flags, "entry_points", lambda group: (other,))
    check_flags(["--attention-backend", "zzz"])
    with pytest.raises(SettingsError, match="did you mean flashinfer"):
        check_flags(["--attention-backend", "flashinfr"])


@pytest.mark.parametrize("found", ["0.5.24", None])
def test_without_sglang_in_this_version_nothing_is_checked(
    monkeypatch: pytest.MonkeyPatch, found: Any
) -> None:
    monkeypatch.setattr(flags, "_installed", lambda: found)
    check_flags(["--new-flag"])


ATTENTION_DP = ("--attn-dp-size", "2")


def settings(*engine_args: str, **more: Any) -> LaunchSettings:
    return LaunchSettings(model_path="m", engine_args=engine_args, **more)


def test_sglang_derives_these_ports_from_an_engines_own() -> None:
    server_args = pytest.importorskip("sglang.srt.server_args")
    first, second = free_ports(21_000, 2, beside=ports_beside(ATTENTION_DP))
    used = []
    for port in (first, second):
        args = server_args.ServerArgs(model_path="m", tp_size=2, attn_dp_size=2, port=port)
        derived = server_args.PortArgs.init_new(args)
        names = [value for name, value in vars(derived).items() if name.endswith("_ipc_name")]
        found = {int(name.rpartition(":")[2]) for name in names if name and "tcp" in name}
        handshake = port + server_args.DP_ATTENTION_HANDSHAKE_PORT_DELTA
        met = port + server_args.ZMQ_TCP_PORT_DELTA
        used.append({*found, handshake, met})
        assert used[-1] == {port + distance for distance in ports_beside(ATTENTION_DP)}
    assert used[0].isdisjoint(used[1])


@pytest.mark.parametrize(
    "flags",
    [
        ATTENTION_DP,
        ("--attention-data-parallel-size=2",),
        ("--dp-size", "2", "--enable-dp-attention"),
        ("--dwdp-size", "2"),
    ],
)
def test_engines_with_data_parallel_attention_share_no_port(flags: tuple[str, ...]) -> None:
    beside = ports_beside(flags)
    found = free_ports(22_000, 8, beside=beside)
    every = [port + distance for port in found for distance in (0, *beside)]
    assert len(set(every)) == len(every)


def test_other_engines_have_consecutive_ports_and_none_beside() -> None:
    assert ports_beside(("--dp-size", "2", "--tp-size", "2", "--attn-dp-size", "1")) == ()


def test_a_port_beside_that_is_taken_moves_the_engine() -> None:
    (port,) = free_ports(23_000, 1, beside=(233,))
    with socket.create_server(("127.0.0.1", port + 233)):
        (other,) = free_ports(port, 1, beside=(233,))
    assert other != port


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--nccl-port", "{}"), ("--dist-init-addr", "127.0.0.1:{}")],
)
def test_a_named_port_that_is_taken_is_refused_with_its_flag(flag: str, value: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        named = value.format(server.getsockname()[1])
        with pytest.raises(SettingsError, match=f"^{flag}={named}: Address already in use by pro"):
            check_addresses(settings(flag, named))
    check_addresses(settings(flag, named))


def test_a_port_that_is_derived_from_a_named_one_is_named_too() -> None:
    (first,) = free_ports(24_000, 1, beside=(13, *range(1, 7)))
    meeting = f"127.0.0.1:{first}"
    taken = socket.create_server(("127.0.0.1", first + 5))
    reason = f"{meeting}: port {first + 5}: Address already in"
    with taken, pytest.raises(SettingsError, match=reason):
        check_addresses(settings("--dist-init-addr", meeting, *ATTENTION_DP))


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (
            settings("--nccl-port", "29500", instances=2),
            "--nccl-port=29500: with instances=2, all engines would listen on it",
        ),
        (
            settings("--load-publish-endpoint", "tcp://*:5557", instances=2),
            "--load-publish-endpoint=tcp://*:5557: with instances=2, all engines would listen on",
        ),
        (
            settings("--disaggregation-mode", "prefill", instances=2),
            "--disaggregation-bootstrap-port=8998: with instances=2, all engines would listen on",
        ),
        (
            settings("--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:5000"),
            "--node-rank=1: only the first machine has a launcher; it has no HTTP server; start",
        ),
        (
            settings("--nnodes", "2", "--dist-init-addr", "10.0.0.1:5000", instances=2),
            "instances=2: with --nnodes=2, an engine of several machines needs a launcher",
        ),
        (settings("--nnodes", "2"), "--nnodes=2: its ranks need an address where they meet: --dis"),
        (
            settings("--nnodes", "2", ray_address="a:1"),
            "--nnodes=2: an engine on Ray has one machine",
        ),
    ],
)
def test_what_the_launcher_cannot_start_is_refused(refused: LaunchSettings, reason: str) -> None:
    with pytest.raises(SettingsError, match=f"^{re.escape(reason)}"):
        check_addresses(refused)


def test_several_engines_may_publish_to_nobody() -> None:
    check_addresses(settings("--kv-events-config", '{"publisher": "null"}', instances=2))


def test_the_first_of_several_machines_is_started() -> None:
    (port,) = free_ports(25_000, 1)
    check_addresses(settings("--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{port}"))


def test_an_engine_of_several_machines_is_not_restarted_by_one_launcher() -> None:
    assert why_one_start(settings("--nnodes", "2")).startswith("--nnodes=2: the engine's other")
    assert why_one_start(settings()) == ""
