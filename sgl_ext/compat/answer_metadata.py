"""Answers of OpenAI's protocols that hold no more than their schema has."""

from typing import Any

from sgl_ext.engine.sglang_types import Original


def text_metadata(original: Original, meta_info: Any) -> dict[str, str] | None:
    """Around `build_endpoint_weight_version_metadata`: `metadata` with texts only.

    SGLang adds the list of weight versions, for which clients with strict types reject the answer.
    """
    metadata = original(meta_info)
    return metadata and {key: text for key, text in metadata.items() if isinstance(text, str)}
