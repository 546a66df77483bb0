"""Checks the model's path, and that `tp` divides it."""

import json
import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from sgl_ext.settings.schema import LaunchSettings, SettingsError
from sgl_ext.sizing.model_config import SizingError, model_folder, read_config

_INDEX = "model.safetensors.index.json"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_CONFIGS = ("config.json", "params.json", "model_index.json")
# With these, attention is not divided by `tp` alone.
_OWN_DIVISION = ("--enable-dp-attention", "--attn-dp-size", "--attn-cp-size", "--dcp-size")


def check_model(settings: LaunchSettings) -> str:
    """What the start will do that a path does not say; "" if nothing. Raises SettingsError."""
    path, note = settings.model_path, ""
    here = Path(path)
    if "://" in path or here.is_file():
        return ""
    if here.is_dir():
        _check_folder(here, path)
    else:
        note = _check_name(path, here)
    _check_division(settings)
    return note


def _check_folder(folder: Path, path: str) -> None:
    if not any((folder / name).is_file() for name in _CONFIGS) and not [*folder.glob("*.gguf")]:
        raise _error(path, "the folder has no config.json, so there is no model in it")
    try:
        listed = json.loads((folder / _INDEX).read_text())["weight_map"].values()
    except (OSError, ValueError, LookupError, AttributeError):
        return
    missing = sorted({name for name in listed if not (folder / name).exists()})
    if missing:
        total = len({*listed})
        raise _error(path, f"{len(missing)} of {total} weight files are missing, as {missing[0]}")


def _check_name(path: str, here: Path) -> str:
    """For what is no local file: what the engines will do with it."""
    siblings = [one.name for one in here.parent.iterdir()] if here.parent.is_dir() else []
    near = get_close_matches(here.name, siblings, 1) if here.parent != Path() else []
    hint = f"; did you mean {here.parent / near[0]}?" if near else ""
    if path[0] == "~" and (home := here.expanduser()).exists():
        hint = f"; did you mean {home}?"  # nothing expands it in a file
    if near or path[0] in "./~" or not _HUB_NAME.fullmatch(path) or path.endswith(".gguf"):
        raise _error(path, f"does not exist{hint}")
    if _cached(path) is not None:
        return ""
    if any(os.environ.get(name, "0") not in ("0", "") for name in _OFFLINE):
        raise _error(path, "no such folder, not in Hugging Face's cache, and HF_HUB_OFFLINE is set")
    what = "is no folder here, so the engines download it from Hugging Face"
    return f"model_path={path!r}: {what}, which can take long; Ctrl-C ends it"


_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def local_folder(path: str) -> Path | None:
    """The folder with the model's files, if they are on this machine."""
    here = Path(path)
    return here if here.is_dir() else _cached(path)


def _cached(path: str) -> Path | None:
    try:
        return model_folder(path)
    except SizingError:
        return None


def _check_division(settings: LaunchSettings) -> None:
    folder = local_folder(settings.model_path)
    if settings.tp == 1 or folder is None or given(settings.engine_args, _OWN_DIVISION):
        return
    try:
        config = read_config(folder)
    except SizingError:
        return
    text = config.get("text_config")
    heads = (text if isinstance(text, dict) else config).get("num_attention_heads")
    if isinstance(heads, int) and heads % settings.tp:
        can = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        reason = f"the model has {heads} attention heads, so tp must be one of {', '.join(can)}"
        raise SettingsError(f"tp={settings.tp}: {reason}")


def given(argv: Sequence[str], flags: Sequence[str]) -> bool:
    """Whether a command line has one of these flags."""
    return bool({word.partition("=")[0] for word in argv} & {*flags})


def _error(path: str, reason: str) -> SettingsError:
    return SettingsError(f"model_path={path!r}: {reason}")
