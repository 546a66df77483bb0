"""Makes an engine give the answers of a script in place of its model's.

    HTTP process   `play`: puts the tokens of the script's answer into the sampling
                   parameters of a request
    scheduler      `Prompter`, a custom logit processor: leaves the sampler one token to choose

Everything else is unchanged: the engine computes, caches and evicts the prompt, it batches, chunks
and retracts requests, and SGLang's parsers read the answer.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from sgl_ext_cpu.script import Script, ScriptError, read_grammar, read_script

_TOKENS = "sgl_ext_cpu_script"
# Drafts from context give a processor that knows of them the number of drafted tokens before a row.
_PLACES, _PLACE = "sgl_ext_places", "sgl_ext_place"
_logger = logging.getLogger(__name__)


class Prompter(CustomLogitProcessor):  # type: ignore[misc]  # sglang is untyped
    """Keeps in each row of logits only the next token of its request's script."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        for row, parameters in zip(logits, custom_param_list, strict=True):
            request, tokens = parameters["__req__"], parameters[_TOKENS]
            # The tokens known now, and not the number of tokens generated: with overlapped
            # scheduling the last one is still on its way. Negative within a prompt's chunks,
            # where nothing is sampled.
            said = request.kv.kv_committed_len - len(request.origin_input_ids)
            if (place := parameters.get(_PLACE)) is not None:
                # SGLang verifies drafts: the due token is not among those that it knows.
                said += 1 + place
            if said >= 0:
                row.fill_(float("-inf"))
                row[tokens[min(said, len(tokens) - 1)]] = 0.0
        return logits


def play(path: Path, server_args: Any) -> None:
    """Makes this process's server give the answers of a script.

    Raises SystemExit, which ends the start, if the script cannot be read or used.
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
    """Puts the script's answer, if there is one, into one of SGLang's requests.

    A request with several prompts, as `/generate` accepts, is not changed. Raises ValueError,
    which SGLang answers with 400, if a client sends a processor, because that would be code.
    """
    if getattr(request, "custom_logit_processor", None) not in (None, _processor()):
        raise ValueError("custom_logit_processor: an engine with a script accepts none")
    prompt = _prompt(tokenizer, request)
    answer = script.next(prompt) if prompt else None
    if answer is None:
        return
    sampling = request.sampling_params or {}
    text = answer.written(prompt, read_grammar(sampling))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    custom = sampling.get("custom_params") or {}
    request.sampling_params = {
        **sampling,
        "custom_params": {**custom, _TOKENS: tokens, _PLACES: True},
    }
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
