"""What the chat template of a model's folder does, without an engine:
`python -m sgl_ext.compat.template_folder FOLDER`.

It prints JSON. Contents are given to the template as SGLang gives them.
"""

import json
import sys
from typing import Any

from sgl_ext.compat.template_model import Json, Render, observe
from sgl_ext.engine import sglang_api


def render_of(folder: str, **options: bool) -> Render:
    """Renders with the template and the special tokens of a folder. Raises ValueError."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"it has no tokenizer that can be read: {reason}") from None
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise ValueError("it has no chat template")
    form = sglang_api.detect_jinja_template_content_format(template)

    def render(messages: list[Json], tools: list[Json]) -> str:
        given = []
        for message in messages:
            message = json.loads(json.dumps(message))
            sglang_api.normalize_assistant_tool_call_arguments(message, strict=True)
            given.append(
                sglang_api.process_content_for_template_format(message, form, [], [], [], [])
            )
        text: str = tokenizer.apply_chat_template(
            given, tools=tools or None, tokenize=False, add_generation_prompt=True, **options
        )
        return text

    return render


def main(folder: str) -> int:
    """Prints what the template does. Returns the exit code."""
    try:
        model = observe(render_of(folder), render_of(folder, thinking=True, enable_thinking=True))
    except ValueError as error:
        print(f"{folder}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(dict(model.lines()), indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
