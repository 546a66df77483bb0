"""Says how much fits: `sgl-ext size --model Qwen/Qwen3-32B --gpu 80GB --tp 2 --sessions 200`."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sgl_ext.arguments import Arguments
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.sizing.model import (
    HOST_RATIO,
    EngineRoom,
    KvCost,
    ModelShape,
    SizingError,
    Wish,
    as_json,
    engine_room,
    engines_for,
    host_needs,
    kv_cost,
    load_of,
    model_folder,
    read_config,
    shape_of,
    weight_bytes,
)

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def run(argv: Sequence[str]) -> int:
    """Prints the capacity sheet and returns the exit code: 2 if something is not known."""
    flags = vars(_parser().parse_args(argv))
    model, dtype, as_json = flags.pop("model"), flags.pop("kv_cache_dtype"), flags.pop("json")
    try:
        folder = model_folder(model)
        shape = shape_of(read_config(folder))
        if flags["weights_bytes"] is None:
            flags["weights_bytes"] = weight_bytes(folder)
        wish = Wish(**flags)
        cost = kv_cost(shape, wish.tp, dtype)
        document = sheet(model, shape, cost, wish, engine_room(shape, cost, wish))
    except SizingError as error:
        print(f"sgl-ext size: {error}", file=sys.stderr)
        return 2
    print(json.dumps(document, indent=2) if as_json else as_text(document).rstrip())
    return 0


def _parser() -> Arguments:
    usual = Wish()
    parser = Arguments(
        prog="sgl-ext size",
        allow_abbrev=False,
        description="How many sessions, pins and tokens fit, by a model's config and a GPU's size.",
        epilog="A size is a number with a unit. As vendors count, 80GB are 80 x 2^30 bytes; "
        "nvidia-smi shows the exact number, such as 81559MiB.",
    )
    add = parser.add_argument
    add("--model", required=True, help="a folder with config.json, or a name in the local cache")
    add("--gpu", dest="gpu_bytes", type=_gpu, metavar="GPU", help=_GPU_HELP)
    add("--tp", type=_count, default=1, help="GPUs of an engine (1)")
    add("--engines", type=_count, default=1, help="engines of the node (1)")
    add("--sessions", type=_count, help="sessions that should stay cached at the same time")
    add("--context", type=_count, default=usual.context, help="tokens of a session (50000)")
    add("--shared", type=int, default=0, help="tokens that all sessions begin with (0)")
    add("--kv-cache-dtype", default="auto", help="as SGLang's flag (auto)")
    add("--weights", dest="weights_bytes", type=_size, metavar="SIZE", help="if no file tells")
    add("--mem-fraction-static", dest="mem_fraction", type=_share, help="as SGLang's flag")
    add("--max-total-tokens", type=_count, help="the KV cache holds this many, whatever the GPU")
    budget = EngineSettings().pin_budget
    add("--pin-budget", type=_share, default=budget, help="as the launcher's flag (1/3)")
    ratio, states = usual.window_ratio, usual.state_ratio
    add("--swa-full-tokens-ratio", dest="window_ratio", type=_share, default=ratio, help="(0.8)")
    add("--mamba-full-memory-ratio", dest="state_ratio", type=float, default=states, help="(0.9)")
    add("--json", action="store_true", help="print JSON")
    return parser


# The memory of one, in MiB, as nvidia-smi shows it.
_GPUS_MIB = {
    "A100": 81920,
    "A100-40GB": 40960,
    "B200": 183359,
    "H100": 81559,
    "H200": 143771,
    "L4": 23034,
    "L40S": 46068,
    "RTX4090": 24564,
}
_GPU_HELP = f"memory of one GPU, as 80GB, or its name: {', '.join(_GPUS_MIB)}"


def _gpu(text: str) -> int:
    mib = _GPUS_MIB.get(text.strip().upper().replace(" ", ""))
    if mib is not None:
        return mib << 20
    if text.strip()[:1].isalpha():
        known = ", ".join(_GPUS_MIB)
        raise argparse.ArgumentTypeError(f"{text!r} is not known; give its memory, or {known}")
    return _size(text)


def _size(text: str) -> int:
    if text.strip().replace(".", "", 1).isdecimal() and float(text):
        raise argparse.ArgumentTypeError(f"{text!r} has no unit: give {text.strip()}GB")
    match = re.fullmatch(r"([\d.]+)\s*([kmgt]?)i?b?", text.strip().lower())
    if match is None or not (value := float(match[1]) * _UNITS[match[2]]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 80GB or 81559MiB")
    return int(value)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
    return value


_GIB = 1 << 30
_ALWAYS_UNKNOWN = (
    "memory of CUDA graphs and activations beyond SGLang's own reserve, and of NCCL's buffers",
    "the draft model of speculative decoding, LoRA adapters, DP attention, pipeline stages",
    "host memory of SGLang's processes: 1.7 GB with a tiny model and no GPU, more is not measured",
)


def sheet(
    model: str, shape: ModelShape, cost: KvCost, wish: Wish, room: EngineRoom
) -> dict[str, Any]:
    """Everything that is known. None: not known, or not used by this model."""
    engines = wish.engines
    needed = None if wish.sessions is None else engines_for(wish.sessions, room)
    return {
        "model": {
            "name": model,
            "architecture": shape.architecture,
            "layers": {
                "full": shape.full_layers,
                "window": shape.window_layers,
                "state": shape.linear.layers if shape.linear else 0,
            },
            "kind": kind_of(shape),
            "context_tokens": shape.context,
        },
        "kv_cache": {
            "dtype": cost.dtype,
            "bytes_per_token_and_gpu": cost.full_token,
            "window_bytes_per_token_and_gpu": cost.window_token,
            "state_bytes_per_sequence_and_gpu": cost.sequence,
        },
        "engine": {"gpus": wish.tp, "gpu_bytes": wish.gpu_bytes, **asdict(room)},
        "node": {
            "engines": engines,
            "context_tokens": wish.context,
            "shared_tokens": wish.shared,
            "resident_sessions": engines * room.resident_sessions,
            "pinned_prefixes": engines * room.pinned_prefixes,
            "sessions": wish.sessions,
            "engines_for_sessions": needed,
            "gpus_for_sessions": None if needed is None else needed * wish.tp,
        },
        "host": as_json(
            host_needs(engines, room.tokens, wish.context, wish.tp * room.kv_bytes_per_gpu)
        ),
        "load": as_json(load_of(wish.context)),
        "not_counted": [*shape.not_counted, *_ALWAYS_UNKNOWN],
    }


def kind_of(shape: ModelShape) -> str:
    """The kinds of attention in words."""
    if shape.latent_dim:
        kind = f"latent vectors of {shape.latent_dim} + {shape.rope_dim}"
        return f"{kind}, and index keys of {shape.index_dim}" if shape.index_dim else kind
    kind = f"{shape.kv_heads} key heads of {shape.head_dim}"
    if shape.window_layers:
        kind += f", sliding window of {shape.window} in {shape.window_layers} layers"
    if shape.linear is not None:
        kind += f", one state per sequence in {shape.linear.layers} layers"
    return kind


def as_text(document: dict[str, Any]) -> str:
    """The document for a reader."""
    model, cache, engine = document["model"], document["kv_cache"], document["engine"]
    node, host, load = document["node"], document["host"], document["load"]
    layers = " + ".join(f"{count} {kind}" for kind, count in model["layers"].items() if count)
    gpus = "GPU" if engine["gpus"] == 1 else "GPUs"
    lines = [
        f"{model['name']}: {model['architecture']}, layers: {layers}; {model['kind']}",
        "",
        f"One engine ({engine['gpus']} {gpus})",
        _row("KV cache of a token, each GPU", f"{cache['bytes_per_token_and_gpu']:,} bytes")
        + f" ({cache['dtype']})",
    ]
    if cache["window_bytes_per_token_and_gpu"]:
        window = cache["window_bytes_per_token_and_gpu"]
        lines.append(_row("and in layers with a window", f"{window:,} bytes"))
    if cache["state_bytes_per_sequence_and_gpu"]:
        state = cache["state_bytes_per_sequence_and_gpu"] / (1 << 20)
        lines.append(_row("state of a sequence, each GPU", f"{state:,.1f} MiB"))
    if engine["mem_fraction"] is not None:
        weights = engine["weights_bytes_per_gpu"] / _GIB
        lines.append(_row("weights, each GPU", f"{weights:,.1f} GiB"))
        lines.append(_row("of its memory for both", f"{engine['mem_fraction']:.1%}"))
    lines += [
        _row("for the KV cache, each GPU", f"{engine['kv_bytes_per_gpu'] / _GIB:,.1f} GiB"),
        _row("tokens in the KV cache", f"{engine['tokens']:,}"),
    ]
    if engine["state_slots"] is not None:
        lines.append(_row("states of sequences", f"{engine['state_slots']:,}"))
    shared = f", {node['shared_tokens']:,} of them shared" if node["shared_tokens"] else ""
    lines += [
        _row("sessions that stay cached", f"{engine['resident_sessions']:,}")
        + f" of {node['context_tokens']:,} tokens{shared}",
        _row("pinned at most", f"{engine['pinned_tokens']:,} tokens")
        + f": {engine['pinned_prefixes']:,} prefixes or contexts of this length",
        "",
        f"The node ({node['engines']} of these)",
        _row("sessions that stay cached", f"{node['resident_sessions']:,}"),
        _row(f"HiCache, hicache-ratio = {HOST_RATIO}", _gib(host["hicache_bytes"]))
        + " of host memory, for agents",
        _row("balancer, at most", _gib(_balancer_bytes(host))) + " of memory a process",
        _row("token cache of an engine", _gib(host["engine_token_cache_bytes"])),
        _row("store, request log, logs", _gib(_disk_bytes(host))) + " of disk at most",
        _row("conversations in the store", f"about {host['store_conversations']:,}"),
        _row("one balancer process takes", f"{load['requests_per_s_and_process']:,} requests/s")
        + f" ({load['balancer_ms']} ms each, measured on a CPU core)",
    ]
    lines += ["", "From what load it pays", *_pays(document)]
    lines += ["", "Not counted", *(f"  {each}" for each in document["not_counted"])]
    return "\n".join(lines) + "\n"


def _pays(document: dict[str, Any]) -> list[str]:
    node, load = document["node"], document["load"]
    resident, context = node["resident_sessions"], node["context_tokens"]
    if load["host_ms_stock"] is None:
        first = f"  a warm turn of {context:,} tokens was not measured: docs/how/engine.md"
    else:
        first = (
            f"  every warm turn: {load['host_ms']:g} ms of host time instead of "
            f"{load['host_ms_stock']:g} (2 CPU cores: docs/how/engine.md)"
        )
    lines = [
        first,
        f"  from {resident + 1:,} sessions on the cache cannot hold all of them: pins, placement",
        "  and priority then decide whose prompts are computed again",
    ]
    if node["engines"] > 1:
        lines.append("  more than one engine: requests go where their prefix is cached")
    if node["sessions"] is not None:
        needed, gpus = node["engines_for_sessions"], node["gpus_for_sessions"]
        text = f"  {node['sessions']:,} sessions stay cached with {needed:,} engines"
        lines.append(f"{text} ({gpus:,} GPUs)")
    return lines


def _row(name: str, value: str) -> str:
    return f"  {name:30} {value:>14}"


def _gib(size: int) -> str:
    return f"{size / _GIB:,.2f} GiB"


def _balancer_bytes(host: dict[str, Any]) -> int:
    return sum(size for name, size in host.items() if name.startswith("balancer_"))


def _disk_bytes(host: dict[str, Any]) -> int:
    return sum(host[name] for name in ("store_bytes", "request_log_bytes", "process_logs_bytes"))


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
