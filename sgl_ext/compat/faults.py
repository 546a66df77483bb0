"""Whose fault an error is: what SGLang knows of it, and leaves out of its answer.

On /v1/responses, SGLang answers 400 to a whole request that the scheduler aborted with another
status, or that failed in SGLang's own code; a stream tells no status at all. And to the text of an
error it adds that of its cause, which is "None" if there is none. So status and text are noted here
where SGLang has them, for the error middleware.

For some bodies that it rejects, SGLang logs a traceback as if it had failed. Such a record becomes
one line.
"""

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from sgl_ext.compat.error_shape import EngineError, scrubbed
from sgl_ext.engine.core.request_context import RequestContext, current

_ENTRY = "sglang.srt.entrypoints"
# For each logger, how a record begins that says what was wrong with a body.
_RECORDS = {
    f"{_ENTRY}.openai.serving_responses": (
        "Error in preprocessing prompt inputs",
        "Error while streaming /v1/responses",
    ),
    f"{_ENTRY}.openai.serving_tokenize": ("Error during detokenization",),
    f"{_ENTRY}.anthropic.serving": (
        "Error converting Anthropic request",
        "Error converting count_tokens request",
    ),
}


async def note_abort(
    original: Callable[..., Awaitable[Any]], manager: Any, out: Any, *args: Any, **kw: Any
) -> Any:
    """Around `TokenizerManager._handle_abort_finish_reason`: notes the status of an abort."""
    finish, context = out["meta_info"]["finish_reason"], current()
    if context is not None and finish.get("type") == "abort":
        context.failed_status = finish.get("status_code") or HTTPStatus.INTERNAL_SERVER_ERROR
    return await original(manager, out, *args, **kw)


async def note_failure(original: Callable[..., Awaitable[Any]], *args: Any, **kw: Any) -> Any:
    """Around `OpenAIServingResponses.responses_full_generator`: notes that SGLang's code failed."""
    try:
        return await original(*args, **kw)
    except Exception as error:
        _note(error)
        raise


class ClientFaults(logging.Filter):
    """Notes the errors of rejected bodies, and logs them without a traceback."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        """Passes every record."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None or not str(record.msg).startswith(self._beginnings):
            return True
        _note(error)
        if is_clients(error):
            record.msg, record.args = f"{record.getMessage()}: {error!r}", ()
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


def is_clients(error: BaseException) -> bool:
    """Whether an error, raised while a body was read, can be the fault of that body."""
    from jinja2 import TemplateError

    return isinstance(error, (ValueError, TypeError, LookupError, OverflowError, TemplateError))


def _note(error: BaseException) -> None:
    context = current()
    if context is None or context.failed_status is not None:
        return
    if not is_clients(error):
        context.failed_status = HTTPStatus.INTERNAL_SERVER_ERROR
    if error.__cause__ is None:
        context.fault = str(error)


def corrected(error: EngineError, context: RequestContext) -> EngineError:
    """An error of /v1/responses with the status and the text that were noted."""
    status = error.status
    if status == HTTPStatus.BAD_REQUEST and context.failed_status is not None:
        status = int(context.failed_status)
    message = context.fault or error.message.removeprefix(f"{status}: ")
    return EngineError(status, scrubbed(status, message), error.param)


def install() -> None:
    """Puts the filters into SGLang's loggers."""
    for name, beginnings in _RECORDS.items():
        logging.getLogger(name).addFilter(ClientFaults(beginnings))
