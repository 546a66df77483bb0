"""Makes an engine say what a script prescribes, in place of what its model would.

    HTTP process   `play`: a request that the script answers is sent on with the tokens of
                   that answer, among its sampling parameters
    scheduler      `Prompter`, a custom logit processor: leaves the sampler one token to choose

All else is as it always is: the prompt is computed, cached and evicted, requests are batched,
chunked and retracted, and SGLang's parsers find out what was said.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from sgl_ext_cpu.script import Script, ScriptError, read_script

_TOKENS = "sgl_ext_cpu_script"
_logger = logging.getLogger(__name__)


class Prompter(CustomLogitProcessor):  # type: ignore[misc]  # sglang is untyped
    """Leaves of each row of logits the token that is next in its request's script."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        for row, parameters in zip(logits, custom_param_list, strict=True):
            request, tokens = parameters["__req__"], parameters[_TOKENS]
            # What is known of it now, and not how many tokens it was given: with overlapped
            # scheduling the last one is still on its way. Negative within a prompt's chunks,
            # of which nothing is sampled.
            said = request.kv.kv_committed_len - len(request.origin_input_ids)
            if said >= 0:
                row.fill_(float("-inf"))
                row[tokens[min(said, len(tokens) - 1)]] = 0.0
        return logits


def play(path: Path, server_args: Any) -> None:
    """Has this process's server give a script's answers, where the script has one.

    Raises SystemExit, which ends the start, if the script cannot be read or would not be heard.
    """
    try:
        script = read_script(path)
    except ScriptError as error:
        raise SystemExit(f"sgl-ext-cpu: {error}") from error
    if server_args.tokenizer_worker_num > 1:
        raise SystemExit(f"sgl-ext-cpu: {path} needs --tokenizer-worker-num 1")
    server_args.enable_custom_logit_processor = True
    generate = TokenizerManager.generate_request

    @functools.wraps(generate)
    def generate_scripted(manager: Any, request: Any, *more: Any, **options: Any) -> Any:
        prescribe(script, manager.tokenizer, request)
        return generate(manager, request, *more, **options)

    TokenizerManager.generate_request = generate_scripted
    _logger.warning("answers are prescribed by %s", path)


def prescribe(script: Script, tokenizer: Any, request: Any) -> None:
    """Puts the script's answer on one of SGLang's requests, unless it has none for it.

    Several prompts in one request, as `/generate` takes them, are left alone. Raises ValueError,
    which SGLang answers with 400, if a client sends a processor: that would be code of its own.
    """
    if getattr(request, "custom_logit_processor", None) not in (None, _processor()):
        raise ValueError("custom_logit_processor: an engine that plays a script takes none")
    prompt = _prompt(tokenizer, request)
    answer = script.next(prompt) if prompt else None
    if answer is None:
        return
    tokens = tokenizer.encode(answer.written(prompt), add_special_tokens=False)
    sampling = request.sampling_params or {}
    custom = sampling.get("custom_params") or {}
    request.sampling_params = {**sampling, "custom_params": {**custom, _TOKENS: tokens}}
    request.custom_logit_processor = _processor()


@functools.cache
def _processor() -> str:
    return str(Prompter.to_str())


def _prompt(tokenizer: Any, request: Any) -> str:
    ids = getattr(request, "input_ids", None)
    if ids and isinstance(ids[0], int):
        return str(tokenizer.decode(ids))
    text = getattr(request, "text", None)
    return text if isinstance(text, str) else ""
