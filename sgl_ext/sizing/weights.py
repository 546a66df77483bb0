"""How many bytes a model's weights take, from its files."""

import json
from pathlib import Path

from sgl_ext.sizing.model_config import SizingError

_INDEX = "model.safetensors.index.json"


def weight_bytes(folder: Path) -> int | None:
    """The bytes of all weights as they are stored, quantized or not; None if no file tells.

    Raises SizingError if the index cannot be read.
    """
    index = folder / _INDEX
    if index.is_file():
        try:
            return int(json.loads(index.read_text())["metadata"]["total_size"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise SizingError(f"{index}: metadata.total_size: {error!r}") from None
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    return sum(sizes) or None
