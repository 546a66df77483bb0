"""Refuses what is out of range before it is sent to a scheduler, for all protocols.

    OpenAIServingChat._apply_jinja_template           `check_variables`  of the chat template
    TokenizerManager.generate_request                 `check_batch`      prompts, samples, lists
    TokenizerManager._validate_one_request            `take`             the vendors' values
                                                      `check_prompt`     each field of one prompt
    TokenizerManager._create_tokenized_object         `check_sent`       token ids, types

The decisions are in `sgl_ext.engine.fields`. SGLang answers 400 to the ValueError that the hooks
raise. The error middleware adds the field, which the context notes.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.request_context import current
from sgl_ext.engine.fields import names, ranges
from sgl_ext.engine.fields.names import in_sglangs_words, is_native
from sgl_ext.engine.fields.patterns import MAX_MATCH_TOKENS
from sgl_ext.engine.fields.ranges import EMBEDDING, GENERATION, Model, WrongField
from sgl_ext.engine.sglang_http_types import TokenizerManager
from sgl_ext.engine.sglang_types import Original

_PLACE = re.compile(r"^(.*?)(?: - at `\$\[(\d+)\](?:\[(\d+)\])?.*)?$", re.DOTALL)
# What the HTTP process makes itself. It is no client's, and large.
_UNSENT = (
    "input_text",
    "input_ids",
    "input_embeds",
    "mm_inputs",
    "token_type_ids",
    "positional_embed_overrides",
    "time_stats",
)
_SAMPLING = "sampling_params"


def check_batch(_: TokenizerManager, request: Any, *__: Any, **___: Any) -> None:
    """Before `TokenizerManager.generate_request`, which cuts a request into its prompts. Raises
    ValueError that names a wrong field."""
    if getattr(request, "parallel_sample_num", None) is not None:
        return  # a part that was checked
    fields = vars(request)
    prompts, is_single = ranges.prompts_of(
        fields.get("text"), fields.get("input_ids"), fields.get("input_embeds")
    )
    is_generation = not isinstance(request, sglang_api.EmbeddingReqInput)
    found = ranges.wrong_batch(fields, prompts, is_single=is_single, is_generation=is_generation)
    if found is None and _is_native():
        # SGLang sets these later in its own requests.
        found = ranges.wrong_internal(fields, GENERATION if is_generation else EMBEDDING)
    if found is not None:
        raise _error(found, of_sampling=found.field in ("n", "beam_width"))


def check_variables(original: Original, serving: Any, request: Any, *args: Any, **kw: Any) -> Any:
    """Around `OpenAIServingChat._apply_jinja_template`. Raises ValueError for a client's variable
    that the template's call takes, or with which the template fails."""
    variables = request.chat_template_kwargs
    if not variables:
        return original(serving, request, *args, **kw)
    if (name := names.taken_variable(variables)) is not None:
        field = f"{names.TEMPLATE_FIELD}.{name}"
        raise _error(WrongField(field, "is set by the server, not by clients"))
    try:
        return original(serving, request, *args, **kw)
    except (TypeError, LookupError, AttributeError, ArithmeticError) as error:
        found = WrongField(names.TEMPLATE_FIELD, f"the template cannot be rendered: {error}")
        raise _error(found) from error


def check_prompt(manager: TokenizerManager, request: Any, input_ids: Any) -> None:
    """Before SGLang validates one tokenized prompt. Raises ValueError that names a wrong field."""
    config = manager.model_config
    model = Model(
        config.vocab_size,
        config.context_len,
        config.hidden_size,
        0 if input_ids is None else len(input_ids),
        _is_native(),
    )
    is_generation = not isinstance(request, sglang_api.EmbeddingReqInput)
    fields, params = vars(request), request.sampling_params or {}
    found = ranges.wrong_sampling(params, model)
    if found is not None:
        raise _error(found, of_sampling=True)
    if not model.prompt_tokens and not _has_more_than_tokens(manager, request):
        field = "text" if request.text is not None else "input_ids"
        raise _error(WrongField(field, "must have at least one token"))
    if is_generation:
        found = ranges.wrong_fields(fields, GENERATION, model)
        found = found or ranges.wrong_product(fields, params, model)
    else:
        found = ranges.wrong_fields(fields, EMBEDDING, model)
    if found is not None:
        raise _error(found)


def check_sent(
    original: Original, manager: TokenizerManager, request: Any, *args: Any, **kw: Any
) -> Any:
    """Around `TokenizerManager._create_tokenized_object`. Raises ValueError that names the field
    that its receiver would fail at."""
    try:
        made = original(manager, request, *args, **kw)
    except (TypeError, OverflowError) as error:
        field = "input_ids" if request.text is None and request.input_ids else _SAMPLING
        raise _error(WrongField(field, f"has a value of a wrong type: {error}")) from error
    if made.input_ids is not None and len(made.input_ids) and made.mm_inputs is None:
        ids = numpy.frombuffer(made.input_ids, dtype=numpy.int64)
        vocab_size = manager.model_config.vocab_size
        if found := ranges.wrong_ids(int(ids.min()), int(ids.max()), vocab_size):
            raise _error(WrongField("input_ids", found))
    if (wrong := _wrong_type(made)) is not None:
        raise wrong
    params = made.sampling_params
    # A pattern without an end would have the whole answer decoded again at every token.
    params.stop_regex_max_len = min(params.stop_regex_max_len, MAX_MATCH_TOKENS)
    return made


def _wrong_type(made: Any) -> ValueError | None:
    """The error of a field whose type the scheduler's decoder does not take."""
    unsent = {name: None for name in _UNSENT if name in made.__struct_fields__}
    try:
        sglang_api.msgpack_decode(
            sglang_api.msgpack_encode(msgspec.structs.replace(made, **unsent))
        )
    except (msgspec.MsgspecError, TypeError, OverflowError, ValueError) as error:
        place = _PLACE.match(str(error))
        what = str(error) if place is None else place[1]
        outer, inner = (None, None) if place is None else (place[2], place[3])
        if outer is None:
            return _error(WrongField(_SAMPLING, f"cannot be sent: {what}"))
        # The first entry of a message is its name.
        field = made.__struct_fields__[int(outer) - 1]
        if field == _SAMPLING and inner is not None:
            field = made.sampling_params.__struct_fields__[int(inner)]
            return _error(WrongField(field, f"is wrong: {what}"), of_sampling=True)
        return _error(WrongField(field, f"is wrong: {what}"))
    return None


def _has_more_than_tokens(manager: TokenizerManager, request: Any) -> bool:
    """Whether a prompt of no tokens is one of media, of embeddings, or of a session's history."""
    session = getattr(request, "session_params", None)
    if isinstance(session, dict) and session.get("id"):
        return True
    has_media = manager.mm_processor is not None and request.contains_mm_input()
    return has_media or request.input_embeds is not None


def _is_native() -> bool:
    context = current()
    return context is not None and names.is_native(context.path)


def _error(found: WrongField, *, of_sampling: bool = False) -> ValueError:
    """The error with the client's name of the field. Notes it in the context."""
    context = current()
    if context is None:
        return ValueError(f"{found.field}: {found.message}")
    body: Mapping[str, Any] = context.body if isinstance(context.body, dict) else {}
    name = names.name_of(found.field, context.path, body, of_sampling=of_sampling)
    context.wrong_field = name
    return ValueError(f"{name}: {found.message}")


def take(_: Any, request: Any, __: Any) -> None:
    """Before SGLang validates one tokenized prompt: replaces values that the vendors' ranges have
    and SGLang's have not."""
    context, params = current(), request.sampling_params
    if context is not None and not is_native(context.path) and isinstance(params, dict):
        params.update(in_sglangs_words(params, context.body))
