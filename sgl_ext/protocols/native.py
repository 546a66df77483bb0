"""Raw prompts: OpenAI's completions, SGLang's own paths, and Ollama's and Vertex AI's."""

import os
from collections.abc import Mapping
from types import MappingProxyType

from sgl_ext.protocols.errors import OPENAI_ERRORS
from sgl_ext.protocols.prompt_cache import NO_PARTS
from sgl_ext.requests.protocol import COMMENT, MarkRules, Part, Protocol


def _raw(
    path: str,
    *prompt: tuple[Part, str],
    beat: bytes = b"",
    refused: Mapping[str, str] = MappingProxyType({}),
) -> Protocol:
    return Protocol(
        paths=(path,),
        errors=OPENAI_ERRORS,
        beat=beat,
        prompt=prompt,
        marks=MarkRules(read_fields=NO_PARTS),
        refused=refused,
    )


_NO_SUFFIX = "write the model's own marks of a gap into the prompt"
COMPLETIONS = _raw(
    "/v1/completions",
    (Part.TEXT, "prompt"),
    beat=COMMENT,
    refused={"suffix": _NO_SUFFIX, "best_of": "send n, and choose"},
)
GENERATE = _raw("/generate", (Part.TEXT, "text"), (Part.TEXT, "input_ids"), beat=COMMENT)
OLLAMA_GENERATE = _raw(
    "/api/generate",
    (Part.INSTRUCTIONS, "system"),
    (Part.TEXT, "prompt"),
    refused={
        "suffix": _NO_SUFFIX,
        "format": "use response_format of /v1/completions",
        "template": "write the whole prompt",
        "context": "write the whole prompt",
        "images": "use /v1/chat/completions",
    },
)
VERTEX = Protocol(
    paths=(os.environ.get("AIP_PREDICT_ROUTE", "/vertex_generate"),),
    errors=OPENAI_ERRORS,
    prompt=((Part.INSTANCES, "instances"),),
)
NATIVE = (COMPLETIONS, GENERATE, OLLAMA_GENERATE, VERTEX)
