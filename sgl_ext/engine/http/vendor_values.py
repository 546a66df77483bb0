"""Gives SGLang the vendors' values in its own words, before their ranges are checked.

TokenizerManager._validate_one_request    `take`
"""

from typing import Any

from sgl_ext.engine.core.request_context import current
from sgl_ext.engine.fields.names import is_native
from sgl_ext.engine.fields.vendors import in_sglangs_words


def take(_: Any, request: Any, __: Any) -> None:
    """Before SGLang validates one tokenized prompt: replaces values that the vendors' ranges have
    and SGLang's have not."""
    context, params = current(), request.sampling_params
    if context is not None and not is_native(context.path) and isinstance(params, dict):
        params.update(in_sglangs_words(params, context.body))
