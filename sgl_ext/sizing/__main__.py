"""Says how much fits: `sgl-ext size --model Qwen/Qwen3-32B --gpu 80GB --tp 2 --sessions 200`."""

import argparse
import json
import re
import sys
from collections.abc import Sequence

from sgl_ext.settings.schema import EngineSettings
from sgl_ext.sizing.kv_cost import kv_cost
from sgl_ext.sizing.model_config import SizingError, model_folder, read_config, shape_of
from sgl_ext.sizing.plan import Wish, engine_room
from sgl_ext.sizing.sheet import as_text, sheet
from sgl_ext.sizing.weights import weight_bytes

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


def _parser() -> argparse.ArgumentParser:
    usual = Wish()
    parser = argparse.ArgumentParser(
        prog="sgl-ext size",
        allow_abbrev=False,
        description="How many sessions, pins and tokens fit, by a model's config and a GPU's size.",
        epilog="A size is a number with a unit. As vendors count, 80GB are 80 x 2^30 bytes; "
        "nvidia-smi shows the exact number, such as 81559MiB.",
    )
    add = parser.add_argument
    add("--model", required=True, help="a folder with config.json, or a name in the local cache")
    add("--gpu", dest="gpu_bytes", type=_size, metavar="SIZE", help="memory of one GPU")
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


def _size(text: str) -> int:
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


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
