"""Raw prompts: OpenAI's completions, SGLang's own paths, and Ollama's and Vertex AI's."""

import os

from sgl_ext.protocols.errors import OPENAI_ERRORS
from sgl_ext.protocols.prompt_cache import NO_PARTS
from sgl_ext.requests.protocol import COMMENT, MarkRules, Part, Protocol


def _raw(path: str, *prompt: tuple[Part, str], beat: bytes = b"") -> Protocol:
    marks = MarkRules(read_fields=NO_PARTS)
    return Protocol(paths=(path,), errors=OPENAI_ERRORS, beat=beat, prompt=prompt, marks=marks)


COMPLETIONS = _raw("/v1/completions", (Part.TEXT, "prompt"), beat=COMMENT)
GENERATE = _raw("/generate", (Part.TEXT, "text"), (Part.TEXT, "input_ids"), beat=COMMENT)
OLLAMA_GENERATE = _raw("/api/generate", (Part.INSTRUCTIONS, "system"), (Part.TEXT, "prompt"))
VERTEX = Protocol(
    paths=(os.environ.get("AIP_PREDICT_ROUTE", "/vertex_generate"),),
    errors=OPENAI_ERRORS,
    prompt=((Part.INSTANCES, "instances"),),
)
NATIVE = (COMPLETIONS, GENERATE, OLLAMA_GENERATE, VERTEX)
