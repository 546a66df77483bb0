"""What two engines must have in common for one to read the KV that the other one computed."""

from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from sgl_ext.sizing.model import SizingError, model_folder

if TYPE_CHECKING:
    from sgl_ext.engine.sglang_types import ResolvedArgs

# Equal tokens have other keys and values, or other bytes, if one of these differs.
_ARGUMENTS = (
    *("attention_backend", "decode_attention_backend", "prefill_attention_backend", "dtype"),
    *("json_model_override_args", "kv_cache_dtype", "load_format", "model_impl"),
    *("model_loader_extra_config", "model_path", "quantization", "quantization_param_path"),
    "revision",
)
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json"}


def digest(*facts: Any) -> str:
    """A name for these facts, which may stand in a path."""
    return sha256(orjson.dumps(facts, default=repr)).hexdigest()[:32]


def engine_facts(args: "ResolvedArgs") -> list[Any]:
    """The facts about SGLang, the model and its adapters."""
    adapters = [getattr(one, "lora_path", one) for one in args.lora_paths or ()]
    files = [[*_files(str(path))] for path in (args.model_path, *adapters)]
    return [version("sglang"), [str(getattr(args, name)) for name in _ARGUMENTS], files]


def _files(model: str) -> Iterator[tuple[str, int, int]]:
    """The files of a model with their sizes and times: weights may change in place."""
    with suppress(SizingError, OSError):
        folder = Path(model) if Path(model).is_dir() else model_folder(model)
        for path in sorted(folder.iterdir()):
            if path.suffix in _WEIGHTS:
                found = path.stat()
                yield path.name, found.st_size, found.st_mtime_ns
