"""instructor: an answer as a model of pydantic, by a named tool or by a schema."""

from __future__ import annotations

import instructor
import openai
import pydantic
from loop import KEY, MODEL, SYSTEM, TOKENS, URL, VARIANT, sessions


class Port(pydantic.BaseModel):
    port: int


def ask(prompt: str, is_streamed: bool) -> str:
    """Both sessions are whole: a stream's tool has another name, and so another prompt."""
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0),
        mode=getattr(instructor.Mode, VARIANT.upper()),
    )
    port = client.chat.completions.create(
        response_model=Port,
        model=MODEL,
        max_tokens=TOKENS,
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}],
        max_retries=0,
    )
    return str(port.port)


sessions(ask)
