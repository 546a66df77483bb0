"""Registers drafts from context with SGLang, as a speculative algorithm beside its own.

SGLang asks an algorithm what it is like in many places. This one says that it is like NGRAM: its
drafts come from the host and need no KV cache of their own. What SGLang asks of all algorithms and
`CustomSpecAlgo` does not answer, its class of built-in algorithms answers for this one too.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sgl_ext.engine import arguments, sglang_api
from sgl_ext.settings.schema import EngineSettings

ALGORITHM = "SGL_EXT_CONTEXT"
"""The name under which `--speculative-algorithm` selects drafts from context."""

VERIFIED_TOKENS = 12
"""The tokens that a step verifies for a request at most, with the one that is due."""

_FLAG = "--speculative-algorithm"
_TOKENS_FLAG = "--speculative-num-draft-tokens"


def draft_flags(argv: Sequence[str], settings: EngineSettings) -> tuple[str, ...]:
    """The flags that turn drafts on; none if the settings do not. Raises ValueError if `argv`
    names another algorithm."""
    if settings.draft_from_context == "off":
        return ()
    given = {flag.partition("=")[0] for flag in argv}
    if _FLAG in given:
        raise ValueError(f"draft-from-context: the engine has a {_FLAG} already; leave one out")
    tokens = () if _TOKENS_FLAG in given else (_TOKENS_FLAG, str(VERIFIED_TOKENS))
    return (_FLAG, ALGORITHM, *tokens)


def register() -> None:
    """Makes `--speculative-algorithm` know the name. Can be called again, as a child that was
    forked does."""
    built_in = sglang_api.SpeculativeAlgorithm
    with suppress(ValueError):
        built_in.from_string(ALGORITHM)
        return

    class ContextDrafts(sglang_api.CustomSpecAlgo):  # type: ignore[misc]  # sglang is untyped
        """Drafts from context, as SGLang's other code sees them."""

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            so_far = arguments.being_resolved(server_args)  # SGLang is resolving them
            tokens = so_far.speculative_num_draft_tokens or VERIFIED_TOKENS
            changed = {
                "enable_mixed_chunk": False,
                "speculative_eagle_topk": 1,
                "speculative_num_draft_tokens": tokens,
                "speculative_num_steps": tokens,
            }
            if so_far.device == "cpu":
                # Nothing runs beside a step there, and SGLang's own algorithms do the same.
                changed["disable_overlap_schedule"] = True
            sglang_api.declare_resolution(server_args, "sgl_ext", **changed)

        def __getattr__(self, name: str) -> Any:
            return vars(built_in)[name].__get__(self) if name in vars(built_in) else _none(name)

    def worker(_: Any) -> type:
        from sgl_ext.engine.drafts.worker import worker_class

        return worker_class()

    built_in.register(ALGORITHM, supports_overlap=True, spec_class=ContextDrafts)(worker)


def _none(name: str) -> Any:
    raise AttributeError(name)
