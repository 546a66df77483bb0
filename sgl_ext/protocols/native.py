"""Raw prompts: OpenAI's completions, SGLang's own paths, and Ollama's and Vertex AI's."""

from __future__ import annotations

import os

from sgl_ext.protocols.errors import OPENAI_ERRORS
from sgl_ext.requests.protocol import MarkRules, Part, Protocol

COMPLETIONS = Protocol(
    paths=("/v1/completions",),
    errors=OPENAI_ERRORS,
    prompt=((Part.TEXT, "prompt"),),
    marks=MarkRules(),
)
GENERATE = Protocol(
    paths=("/generate",),
    errors=OPENAI_ERRORS,
    prompt=((Part.TEXT, "text"), (Part.TEXT, "input_ids")),
    marks=MarkRules(),
)
OLLAMA_GENERATE = Protocol(
    paths=("/api/generate",),
    errors=OPENAI_ERRORS,
    prompt=((Part.INSTRUCTIONS, "system"), (Part.TEXT, "prompt")),
    marks=MarkRules(),
)
VERTEX = Protocol(
    paths=(os.environ.get("AIP_PREDICT_ROUTE", "/vertex_generate"),),
    errors=OPENAI_ERRORS,
    prompt=((Part.INSTANCES, "instances"),),
)
NATIVE = (COMPLETIONS, GENERATE, OLLAMA_GENERATE, VERTEX)
