"""What clients ask of the sampler and of the end of an answer, where it would end a scheduler.

SGLang searches for `stop_regex` at every token, in the scheduler's thread and with Python's `re`.
There a pattern can take minutes, in which no request of the engine goes on.

A grammar in which nothing can be written allows no token, nor does one at its end together with
`min_new_tokens`. Then no probability is a number, and the sampler's failure ends the scheduler. The
first is refused when it is compiled; of the second only its own request fails.

SGLang keeps every grammar that it has compiled, some with tens of megabytes.

    fault     a client's expression or grammar can hold up or end a scheduler, and grammars are
              never dropped
    hooks     group "sampler", and `re` in the module that ends requests
    test      tests/compat/test_sampler.py
    upstream  no patch yet
    ends with a version that bounds all three
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from sgl_ext.engine import sglang_api
from sgl_ext.engine.fields.patterns import LinearRegex
from sgl_ext.engine.sglang_types import GrammarBackend, SamplingBatchInfo

MAX_GRAMMARS = 256
"""Compiled grammars that a scheduler keeps."""
_NAME = "re"


def use_linear_regex(request_class: Any, module: ModuleType) -> None:
    """Replaces `re` in the module that checks how requests end.

    Raises RuntimeError if SGLang no longer searches there with it.
    """
    code = request_class._check_str_based_finish.__code__
    if vars(module).get(_NAME) is None or not {_NAME, "search"} <= set(code.co_names):
        raise RuntimeError(f"{module.__name__} searches for stop_regex in another way")
    setattr(module, _NAME, LinearRegex)


def allow_some_token(_: None, sampling: SamplingBatchInfo, logits: Any, *__: Any) -> None:
    """After `_apply_post_grammar_logits_transforms`: a request that may write no token may write
    any. Its grammar then rejects the token, and ends this request alone.

    logits: of shape (requests, vocabulary), changed in place.
    """
    if sampling.grammars:
        is_none = logits.amax(dim=-1, keepdim=True) == float("-inf")
        logits.masked_fill_(is_none, 0.0)


def refuse_empty_grammars(
    inner: Callable[..., Any], backend: GrammarBackend, *args: Any, **kw: Any
) -> Any:
    """Around `BaseGrammarBackend._init_value_dispatch`: a grammar in which nothing can be written
    counts as one that cannot be compiled, so that the error names the field.

    This runs in the thread that compiles. What cannot be written further on is not looked for.
    """
    import torch

    grammar = inner(backend, *args, **kw)
    if grammar is None or isinstance(grammar, sglang_api.InvalidGrammarObject):
        return grammar
    vocab_size = getattr(grammar, "vocab_size", None)
    if vocab_size is None:
        return grammar
    allowed = grammar.allocate_vocab_mask(vocab_size, 1, "cpu")
    if allowed.dtype is not torch.int32:  # a bit a token; others have other masks
        return grammar
    grammar.fill_vocab_mask(allowed, 0)
    return grammar if allowed.any() else sglang_api.InvalidGrammarObject("nothing can be written")


def forget_grammars(_: None, backend: GrammarBackend, *__: Any) -> None:
    """After `BaseGrammarBackend.set_cache`: forgets all grammars when there are too many.

    All ranks store the same grammars in the same order, so all forget them at once. Requests that
    run have copies.
    """
    if len(backend.cache) > MAX_GRAMMARS:
        backend.reset()
        inner: GrammarBackend | None = getattr(backend, "grammar_backend", None)
        if inner is not None:
            inner.reset()
