"""Every field of SGLang's requests and sampling parameters, and what it may be.

Clients reach a scheduler through many paths and protocols. SGLang makes one `GenerateReqInput` or
`EmbeddingReqInput` of all of them, with a dictionary of `SamplingParams`. So the three tables here
hold for each path, and a test fails if SGLang has a field that they lack. The client's name of a
field is in `sgl_ext.engine.fields.names`.

What is out of range in a scheduler ends it: an index beyond a tensor, a number beyond 32 bits, a
probability that is not a number. What is in range and large freezes it. So products have bounds,
too: log probabilities of tokens, and prompts in one request.

A check of one value says what is wrong with it, and what it takes. `wrong(value, model)` returns
what a value must be, or None if it is right. A value that is None or absent is right: SGLang then
takes its default. `str(check)` is text in docs/reference/limits.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from sgl_ext.engine.fields.patterns import MAX_EBNF, MAX_ONE_CHARS, Grammar, Patterns, Schema

INT32, INT64 = 2**31 - 1, 2**63 - 1
_SHOWN = 40


class Model(NamedTuple):
    """What bounds the fields of a request.

    vocab_size, context_tokens, hidden_size: of the engine's model.
    prompt_tokens: of the request; 0 before it is tokenized.
    is_native: the client wrote SGLang's own fields, and no other protocol's.
    """

    vocab_size: int
    context_tokens: int
    hidden_size: int = 0
    prompt_tokens: int = 0
    is_native: bool = False


class Check(Protocol):
    """Finds out what is wrong with a value."""

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer in a range, the ends included."""

    low: int
    high: int

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        if type(value) is int and self.low <= value <= self.high:
            return None
        return f"must be an integer from {self.low} to {self.high}{_got(value)}"

    def __str__(self) -> str:
        high = {INT32: "2^31 - 1", INT64: "2^63 - 1", 1 << 30: "2^30"}.get(self.high, self.high)
        low = "-2^63" if self.low == -INT64 - 1 else self.low
        return f"an integer from {low} to {high}"


@dataclass(frozen=True, slots=True)
class WholeTo:
    """An integer up to a number that the model or the prompt sets.

    of: the attribute of `Model`. less: by which the greatest value is below it.
    """

    low: int
    of: str
    high: int = INT64
    less: int = 0

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        high = min(self.high, getattr(model, self.of) - self.less)
        if type(value) is int and self.low <= value <= high:
            return None
        return f"must be an integer from {self.low} to {high}{_got(value)}"

    def __str__(self) -> str:
        names = {"vocab_size": "the vocabulary's size", "prompt_tokens": "the prompt's tokens"}
        limit = "" if self.high == INT64 else f"{self.high:,} and "
        return f"an integer from {self.low} to {limit}{names[self.of]}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """A value that either of two checks takes. The message is the second's."""

    only: Any
    other: Check

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        if type(value) is type(self.only) and value == self.only:
            return None
        found = self.other.wrong(value, model)
        return None if found is None else found.replace("must be", f"must be {self.only}, or", 1)

    def __str__(self) -> str:
        return f"{self.only}, or {self.other}"


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number in a range, the ends included."""

    low: float
    high: float

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        if type(value) in (int, float) and self.low <= value <= self.high:
            return None
        return f"must be a number from {self.low:g} to {self.high:g}{_got(value)}"

    def __str__(self) -> str:
        low, high = (f"{int(x):,}" if x == int(x) else f"{x:g}" for x in (self.low, self.high))
        return f"a number from {low} to {high}"


@dataclass(frozen=True, slots=True)
class Flag:
    """true or false."""

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        return None if type(value) is bool else f"must be true or false{_got(value)}"

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class Text:
    """A text of a bounded length."""

    limit: int

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        if not isinstance(value, str):
            return f"must be a text{_got(value)}"
        if len(value) > self.limit:
            return f"must have at most {self.limit} characters, and has {len(value)}"
        return None

    def __str__(self) -> str:
        return f"a text of {self.limit:,} characters"


@dataclass(frozen=True, slots=True)
class Texts:
    """A text or a list of texts: how many, how long each, and all together."""

    count: int
    each: int
    total: int

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
            return "must be a text or a list of texts"
        if len(values) > self.count:
            return f"must have at most {self.count} texts, and has {len(values)}"
        if (longest := max(map(len, values), default=0)) > self.each:
            return f"a text must have at most {self.each} characters, and one has {longest}"
        if (total := sum(map(len, values))) > self.total:
            return f"must have at most {self.total} characters in all, and has {total}"
        return None

    def __str__(self) -> str:
        return f"{self.count} texts of {self.each:,} characters, {self.total:,} in all"


@dataclass(frozen=True, slots=True)
class Ids:
    """A list of token ids of the vocabulary."""

    count: int

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        if not isinstance(value, list):
            return f"must be a list of token ids{_got(value)}"
        if len(value) > self.count:
            return f"must have at most {self.count} token ids, and has {len(value)}"
        for each in value:
            if type(each) is not int or not 0 <= each < model.vocab_size:
                return f"must have token ids from 0 to {model.vocab_size - 1}{_got(each)}"
        return None

    def __str__(self) -> str:
        return f"{self.count:,} token ids of the vocabulary"


@dataclass(frozen=True, slots=True)
class Biases:
    """Numbers by token id, as text or integer."""

    count: int
    each: Number

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        if not isinstance(value, Mapping):
            return f"must be an object{_got(value)}"
        if len(value) > self.count:
            return f"must have at most {self.count} token ids, and has {len(value)}"
        for key, bias in value.items():
            digits = str(key)
            is_id = digits.isascii() and digits.isdecimal() and len(digits) < 12
            if not is_id or int(digits) >= model.vocab_size:
                return f"must have token ids from 0 to {model.vocab_size - 1}{_got(key)}"
            if (found := self.each.wrong(bias, model)) is not None:
                return found
        return None

    def __str__(self) -> str:
        return f"{self.count:,} token ids of the vocabulary, each with {self.each}"


@dataclass(frozen=True, slots=True)
class Fields:
    """An object whose fields have checks of their own; others are wrong.

    needs: fields that are right only together with another one.
    """

    checks: Mapping[str, Check]
    needs: Mapping[str, str]

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        if not isinstance(value, dict):
            return f"must be an object{_got(value)}"
        for name, inner in value.items():
            check = self.checks.get(name)
            if check is None:
                return f"has no field {str(name)[:_SHOWN]!r}"
            if inner is not None and (found := check.wrong(inner, model)) is not None:
                return f"{name} {found}"
        for name, other in self.needs.items():
            if value.get(name) and value.get(other) is None:
                return f"{name} must be together with {other}"
        return None

    def __str__(self) -> str:
        fields = [f"`{name}`: {check}" for name, check in self.checks.items()]
        needs = [f"`{name}` together with `{other}`" for name, other in self.needs.items()]
        return "; ".join(fields + needs)


@dataclass(frozen=True, slots=True)
class Notes:
    """An object of scalars, or of lists and objects of scalars, as SGLang's `custom_params`.

    whole: the fields that a scheduler calculates with, each with its check.
    """

    count: int
    characters: int
    whole: Mapping[str, Check]

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        if not isinstance(value, dict):
            return f"must be an object{_got(value)}"
        if len(value) > self.count:
            return f"must have at most {self.count} fields, and has {len(value)}"
        size = 0
        for name, inner in value.items():
            check = self.whole.get(name)
            if check is not None and inner is not None and (found := check.wrong(inner, model)):
                return f"{name} {found}"
            values = inner if isinstance(inner, list) else [inner]
            values = list(inner.values()) if isinstance(inner, dict) else values
            if not all(_is_scalar(each) for each in values):
                return f"{str(name)[:_SHOWN]!r} must have texts, numbers, true, false or null"
            size += len(name) + sum(len(str(each)) for each in values)
        if size > self.characters:
            return f"must have at most {self.characters} characters, and has {size}"
        return None

    def __str__(self) -> str:
        inner = "; ".join(f"`{name}`: {check}" for name, check in self.whole.items())
        end = f"; {inner}" if inner else ""
        return f"{self.count} fields, {self.characters:,} characters, one level deep{end}"


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A vector of finite numbers for each token."""

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        rows = value if isinstance(value, list) else [value]
        for row in rows:
            is_row = isinstance(row, list) and len(row) == model.hidden_size
            if not is_row or not all(type(x) in (int, float) and math.isfinite(x) for x in row):
                return f"must have {model.hidden_size} finite numbers for each token"
        return None

    def __str__(self) -> str:
        return "a vector of the model's width for each token, of finite numbers"


@dataclass(frozen=True, slots=True)
class Internal:
    """A field that the engine sets itself, and a client must not.

    unset: its value before, beside None.
    """

    by: str
    unset: int | None = None

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        is_unset = value is None or (type(value) is type(self.unset) and value == self.unset)
        return f"is set by {self.by}, not by clients" if model.is_native and not is_unset else None

    def __str__(self) -> str:
        return f"refused: {self.by} sets it"


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A field that reaches no scheduler as the client sent it, or that is checked elsewhere."""

    why: str

    def wrong(self, value: Any, model: Model) -> str | None:
        """None: the field is no matter of this table."""
        return None

    def __str__(self) -> str:
        return self.why


def _is_scalar(value: Any) -> bool:
    if type(value) is int:
        return -INT64 <= value <= INT64
    return value is None or type(value) in (str, bool) or _is_finite(value)


def _is_finite(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


def _got(value: Any) -> str:
    text = repr(value) if isinstance(value, (int, float, str, bool, type(None))) else ""
    return f"; got {text}" if 0 < len(text) <= _SHOWN else ""


MAX_SAMPLES = 128
MAX_PARTS = 128
"""Prompts of one request, times its samples."""
MAX_READ = 2_048
"""Prompts for which nothing is written: of embeddings and scores."""
MAX_TOP = 1_000
"""Log probabilities of one position, and the token ids that a request names."""
FREE_TOP = 20
"""Of each token of an answer, however long: what the vendors' own APIs allow."""
MAX_PROMPT_LOGPROBS = 200_000
"""Beside the one of the prompt's own token at each position."""
MAX_ANSWER_LOGPROBS = 2_000_000
_PARAMS = "sampling_params"
_NAME = Text(1_024)
_KEY = Text(65_536)
_LEAST_PENALTY = 1e-6
"""A division by much less leaves the range of 32 bits."""
_MEDIA = Elsewhere("only models that take media read it")
_NO_SCHEDULER = Elsewhere("no scheduler reads it")
_OF_BATCH = Elsewhere("checked with the prompt's tokens")
_BY_NORMALIZE = "`normalize`"
_NORMALIZED = Internal(_BY_NORMALIZE)
_SCORING = Internal("`/v1/score`")
_ENCODERS = Internal("the engine of a split encoder")

SAMPLING: Mapping[str, Check] = {
    "max_new_tokens": Whole(0, INT64),
    "min_new_tokens": Whole(0, INT64),
    "stop": Texts(32, 1_024, 4_096),
    "stop_token_ids": Ids(1_000),
    "stop_regex": Patterns(),
    "temperature": Number(0, 1_000),
    "top_p": Number(1e-30, 1),
    "top_k": OneOf(-1, Whole(1, 1 << 30)),
    "min_p": Number(0, 1),
    "frequency_penalty": Number(-2, 2),
    "presence_penalty": Number(-2, 2),
    "repetition_penalty": Number(_LEAST_PENALTY, 2),
    "n": Whole(1, MAX_SAMPLES),
    "beam_width": Whole(1, MAX_SAMPLES),
    "json_schema": Schema(),
    "regex": Grammar(MAX_ONE_CHARS),
    "ebnf": Grammar(MAX_EBNF),
    "structural_tag": Schema(),
    "ignore_eos": Flag(),
    "skip_special_tokens": Flag(),
    "spaces_between_special_tokens": Flag(),
    "no_stop_trim": Flag(),
    "stream_interval": Whole(1, INT32),
    "logit_bias": Biases(10_000, Number(-1e6, 1e6)),
    "sampling_seed": Whole(-INT64 - 1, INT64),
    "custom_params": Notes(64, 65_536, {"thinking_budget": Whole(0, INT32)}),
    "watermark": Elsewhere("SGLang checks it whole"),
    "stop_strs": _NORMALIZED,
    "stop_regex_strs": _NORMALIZED,
    "stop_str_max_len": Internal(_BY_NORMALIZE, 0),
    "stop_regex_max_len": Internal(_BY_NORMALIZE, 0),
    "is_normalized": Internal(_BY_NORMALIZE, False),
    "ebnf_full_assistant": Internal("the chat template", False),
}
"""The fields of `SamplingParams`."""

_BOTH: Mapping[str, Check] = {
    "rid": _NAME,
    "text": Elsewhere("tokenized"),
    "input_ids": Elsewhere("token ids of the vocabulary"),
    "input_embeds": Embeddings(),
    "image_data": _MEDIA,
    "video_data": _MEDIA,
    "audio_data": _MEDIA,
    "modalities": _MEDIA,
    "sampling_params": Elsewhere("the table of sampling parameters"),
    "log_metrics": Flag(),
    "lora_path": Text(4_096),
    "lora_id": Internal("the table of adapters"),
    "positional_embed_overrides": _SCORING,
    "routing_key": _NAME,
    "http_worker_ipc": Internal("the HTTP process"),
    "background": Flag(),
    "priority": Whole(-INT64 - 1, INT64),
    "return_prompt_token_ids": Flag(),
    "external_trace_header": _NO_SCHEDULER,
    "received_time": Number(0, 1e12),
    "multi_item_delimiter_indices": _SCORING,
    "token_indices_to_pool": _SCORING,
}
GENERATION: Mapping[str, Check] = {
    **_BOTH,
    "session_id": _NAME,
    "mm_hashes": _MEDIA,
    "mm_content_hashes": _MEDIA,
    "use_audio_in_video": Flag(),
    "video_config": _MEDIA,
    "watermark": Elsewhere("SGLang checks it whole"),
    "return_logprob": Flag(),
    "logprob_start_len": WholeTo(-1, "prompt_tokens"),
    "top_logprobs_num": WholeTo(0, "vocab_size", MAX_TOP),
    "token_ids_logprob": Ids(MAX_TOP),
    "return_sampling_mask": Flag(),
    "sampling_logprobs_mode": _NAME,
    "return_text_in_logprobs": Flag(),
    "return_flat_raw_top_logprobs": Flag(),
    "return_flat_raw_output_top_logprobs": Flag(),
    "return_flat_raw_top_logprobs_b64": Flag(),
    "stream": Flag(),
    "return_hidden_states": Elsewhere("SGLang checks it against the engine's own mode"),
    "return_routed_experts": Flag(),
    "routed_experts_start_len": WholeTo(0, "prompt_tokens"),
    "return_indexer_topk": Flag(),
    "session_params": Fields(
        {
            "id": _NAME,
            "rid": _NAME,
            "offset": Whole(-1, INT32),
            "replace": Flag(),
            "drop_previous_output": Flag(),
        },
        needs={"replace": "rid"},  # SGLang changes the table of requests that it goes through
    ),
    "custom_logit_processor": Text(1 << 20),
    "bootstrap_host": Text(255),
    "bootstrap_port": Whole(1, 65_535),
    "bootstrap_room": Whole(0, INT64),
    "bootstrap_pair_key": _NAME,
    "decode_tp_size": Whole(1, 65_535),
    "routed_dp_rank": Whole(0, 65_535),
    "data_parallel_rank": Whole(0, 65_535),
    "disagg_prefill_dp_rank": Whole(0, 65_535),
    "conversation_id": _NAME,
    "require_reasoning": Flag(),
    "max_thinking_tokens": Whole(0, INT32),
    "extra_key": _KEY,
    "no_logs": Flag(),
    "custom_labels": Notes(64, 4_096, {}),
    "return_bytes": Flag(),
    "return_entropy": Flag(),
    "need_wait_for_mm_inputs": _ENCODERS,
    "num_items_assigned": _ENCODERS,
    "encoder_urls": _ENCODERS,
    "max_dynamic_patch": Whole(1, 1_024),
    "min_dynamic_patch": Whole(1, 1_024),
    "image_max_dynamic_patch": Whole(1, 1_024),
    "video_max_dynamic_patch": Whole(1, 1_024),
    "images_config": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "cache_salt": _KEY,
    "kv_hints": Elsewhere("[cache marks](../guide/pins.md)"),
}
"""The fields of `GenerateReqInput`."""
EMBEDDING: Mapping[str, Check] = {
    **_BOTH,
    "embed_override_token_id": WholeTo(0, "vocab_size", less=1),
    "embed_overrides": Elsewhere("`/v1/embeddings` checks it"),
    "is_cross_encoder_request": Flag(),
    "dimensions": Whole(1, INT32),
    "return_pooled_hidden_states": Flag(),
    "decision_layout": Internal("`/v1/systemone`"),
}
"""The fields of `EmbeddingReqInput`."""


class WrongField(NamedTuple):
    """A field that is out of its range. message: what it must be."""

    field: str
    message: str


def wrong_sampling(params: Mapping[str, Any], model: Model) -> WrongField | None:
    """The first wrong field of one prompt's sampling parameters."""
    for name, value in params.items():
        check = SAMPLING.get(name)
        if check is None:
            return WrongField(str(name)[:64], "is no sampling parameter")
        if value is not None and (found := check.wrong(value, model)) is not None:
            return WrongField(name, found)
    least, most = params.get("min_new_tokens") or 0, params.get("max_new_tokens")
    if most is not None and least > most:
        return WrongField("min_new_tokens", f"must be at most max_new_tokens, {most}; got {least}")
    return None


def wrong_fields(
    fields: Mapping[str, Any], table: Mapping[str, Check], model: Model
) -> WrongField | None:
    """The first wrong field of one prompt's request. Internal ones are set by now."""
    for name, check in table.items():
        value = fields.get(name)
        if value is None or isinstance(check, Internal):
            continue
        if (found := check.wrong(value, model)) is not None:
            return WrongField(name, found)
    return None


def wrong_internal(fields: Mapping[str, Any], table: Mapping[str, Check]) -> WrongField | None:
    """The first field that a client has set in place of the engine."""
    for name, check in table.items():
        if isinstance(check, Internal) and (found := check.wrong(fields.get(name), _NATIVE)):
            return WrongField(name, found)
    return None


def wrong_batch(
    fields: Mapping[str, Any], prompts: int, *, is_single: bool, is_generation: bool = True
) -> WrongField | None:
    """What is wrong with a request of so many prompts, before it is cut into its parts."""
    params = fields.get(_PARAMS)
    listed = params if isinstance(params, list) else [{} if params is None else params]
    if not all(isinstance(each, dict) for each in listed):
        return WrongField(_PARAMS, "must be an object, or a list with one of each prompt")
    if not prompts or (isinstance(params, list) and len(listed) != prompts):
        return _uneven(_PARAMS if prompts else "text", prompts)
    samples, limit = 1, MAX_READ
    for each in listed:
        for name in ("n", "beam_width"):
            value = each.get(name)
            found = None if value is None else SAMPLING[name].wrong(value, _NO_MODEL)
            if found is not None:
                return WrongField(name, found)
        samples = max(samples, each.get("n") or 1)
        if is_generation and each.get("max_new_tokens") != 0:
            limit = MAX_PARTS
    if prompts * samples > limit:
        field = "n" if prompts == 1 else "text" if fields.get("text") is not None else "input_ids"
        return WrongField(
            field,
            f"a request must have at most {limit} prompts, times its samples, "
            f"and has {prompts * samples}",
        )
    if is_single:
        lists = (name for name in _ONE_EACH if isinstance(fields.get(name), list))
        first = next(lists, None) if samples == 1 else None
        return None if first is None else WrongField(first, "must be no list for one prompt")
    for name, value in fields.items():
        if isinstance(value, list) and name not in _OF_ITSELF and len(value) != prompts:
            if name == "token_ids_logprob" and not (value and isinstance(value[0], list)):
                continue
            return _uneven(name, prompts)
    return None


_ONE_EACH = (_PARAMS, "rid", "lora_path")
"""Fields that SGLang reads before it checks one prompt."""
_NO_MODEL = Model(0, 0)
_NATIVE = Model(0, 0, is_native=True)
_OF_ITSELF = frozenset({"modalities", "encoder_urls", _PARAMS})
"""Lists that have no entry for each prompt, or that are checked before."""


def _uneven(field: str, prompts: int) -> WrongField:
    if not prompts:
        return WrongField(field, "must have at least one prompt")
    return WrongField(field, f"must have one entry for each of the {prompts} prompts")


def wrong_product(
    fields: Mapping[str, Any], params: Mapping[str, Any], model: Model
) -> WrongField | None:
    """Whether the log probabilities of one prompt, all together, are too many."""
    if not fields.get("return_logprob"):
        return None
    ids = fields.get("token_ids_logprob") or ()
    top = (fields.get("top_logprobs_num") or 0) + len(ids)
    start = fields.get("logprob_start_len")
    read = 0 if start is None or start < 0 else model.prompt_tokens - start
    field = "token_ids_logprob" if ids else "top_logprobs_num"
    samples = params.get("n") or 1
    if (made := read * top * samples) > MAX_PROMPT_LOGPROBS:
        return WrongField(
            field,
            f"a request must have at most {MAX_PROMPT_LOGPROBS} log probabilities of its prompt, "
            f"and this one has {made}: {read} tokens from logprob_start_len on",
        )
    written = params.get("max_new_tokens")
    room = max(model.context_tokens - model.prompt_tokens, 0)
    written = room if written is None else min(written, room)
    if top > FREE_TOP and (made := written * top) > MAX_ANSWER_LOGPROBS:
        return WrongField(
            field,
            f"above {FREE_TOP}, an answer must have at most {MAX_ANSWER_LOGPROBS} log "
            f"probabilities, and this one may have {made}: {written} tokens",
        )
    return None


def wrong_ids(low: int, high: int, vocab_size: int) -> str | None:
    """What token ids between these two must be; None if all are in the vocabulary."""
    if low >= 0 and high < vocab_size:
        return None
    return f"must have token ids from 0 to {vocab_size - 1}; got {low if low < 0 else high}"


def prompts_of(text: Any, input_ids: Any, input_embeds: Any) -> tuple[int, bool]:
    """How many prompts a request has, and whether it is one and not a list of one."""
    if text is not None:
        return (1, True) if isinstance(text, str) else (_length(text), False)
    if input_ids is not None:
        is_batch = _is_nested(input_ids)
        return (_length(input_ids), False) if is_batch else (1, True)
    if isinstance(input_embeds, Sequence) and input_embeds:
        is_batch = _is_nested(input_embeds[0])
        return (len(input_embeds), False) if is_batch else (1, True)
    return 1, True


def _is_nested(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and isinstance(values[0], list)


def _length(values: Any) -> int:
    return len(values) if isinstance(values, list) else 1
