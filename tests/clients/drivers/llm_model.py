"""llm, by its Python interface, with a model of `extra-openai-models.yaml`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from loop import FUNCTIONS, KEY, MODEL, SYSTEM, URL, sessions

settings = {
    "model_id": "node",
    "model_name": MODEL,
    "api_base": f"{URL}/v1",
    "supports_tools": True,
    "api_key_name": "node",
}
# JSON is YAML.
(Path(os.environ["LLM_USER_PATH"]) / "extra-openai-models.yaml").write_text(json.dumps([settings]))

import llm  # noqa: E402  (it reads the file when it is imported)


def ask(prompt: str, is_streamed: bool) -> str:
    model = llm.get_model("node")
    chain = model.chain(
        prompt, system=SYSTEM, tools=list(FUNCTIONS.values()), stream=is_streamed, key=KEY
    )
    return list(chain.responses())[-1].text()


sessions(ask)
