"""What the text around a difference says of it: a tenant's field, a task list, an output format.

    Tenant: acme                    tenant_field: the line gives the field a name
    - [ ] write the test            task_list: a box, a status, or a heading above list items
    Answer in this JSON schema: {   response_format: a format is announced, and not yet ended

All are guesses by words, so each needs them close to the difference, in what both texts share or
on the lines that differ.
"""

import re

TENANT_FIELD, TASK_LIST, RESPONSE_FORMAT = "tenant_field", "task_list", "response_format"
_LINE_BYTES = 256
_ABOVE_BYTES = 2048
_TENANT = re.compile(
    rb"(?<![a-z0-9])(?:tenant|customer|organi[sz]ation|org|account|workspace|company|department"
    rb"|team|user|member|subscriber|e-?mail|locale|virtual[ _-]key|cost[ _-]cent(?:er|re))"
    rb"(?:[ _-]?(?:id|name|key|uuid|slug|e-?mail|alias))?"
    rb"[\"'`*]{0,3} ?[:=>][ \"'`*]{0,4}[^\s\"'`,;<>]{0,64}\Z",
    re.IGNORECASE,
)
_BOX = re.compile(rb"^\s*(?:[-*+]|\d+[.)])?\s*\[[ xX~/>-]\]\s")
_STATUS = re.compile(rb"\"status\":\s*\"(?:pending|in_progress|completed|done|cancelled)\"")
_WORDS = (
    rb"(?:(?:current|open|your|my|remaining|active) )?(?:to-?do|task)(?:s|[ _-]?list)\b[^\n]{0,48}"
)
# A heading, or a line that ends in a colon; then list items up to the line of the difference.
_TASK_HEADING = re.compile(
    rb"(?:^|\n)(?:[#*<]{1,8} ?" + _WORDS + rb"|" + _WORDS + rb":[* ]*)\n"
    rb"(?:[ \t]*(?:[-*+\[\"{]|\d+[.)])[^\n]*\n|\n)*[^\n]*\Z",
    re.IGNORECASE,
)
_ITEM = re.compile(rb"^\s*(?:[-*+\[\"{]|\d+[.)])")
_FORMAT = re.compile(
    rb"json[ _-]?schema|\"\$schema\"|(?:response|output|answer)[ _-](?:format|schema)"
    rb"|\b(?:respond|reply|answer|output|return)\b[^.\n]{0,60}\b(?:json|schema|xml|yaml)\b",
    re.IGNORECASE,
)
# A blank line ends a format, unless the schema itself follows it.
_FORMAT_ENDS = re.compile(rb"\n[ \t]*\n(?!\s*(?:```|[{<]))")


def tenant_field(old: bytes, new: bytes, at: int) -> str | None:
    """TENANT_FIELD if both texts have different values of one such field at byte `at`."""
    return TENANT_FIELD if _TENANT.search(_line_start(new, at)) and _goes_on(old, new, at) else None


def list_or_format(old: bytes, new: bytes, at: int) -> str | None:
    """TASK_LIST, RESPONSE_FORMAT or None for two texts whose first difference is at byte `at`."""
    lines = [_line_start(text, at) + _line_end(text, at) for text in (old, new)]
    above = new[max(at - _ABOVE_BYTES, 0) : at]
    if any(all(map(found.search, lines)) for found in (_BOX, _STATUS)):
        return TASK_LIST
    if any(map(_ITEM.search, lines)) and _TASK_HEADING.search(above):
        return TASK_LIST
    for announced in _FORMAT.finditer(above + _line_end(new, at)):
        if not _FORMAT_ENDS.search(above, announced.end()):
            return RESPONSE_FORMAT
    return None


def _line_start(text: bytes, at: int) -> bytes:
    """The line of byte `at`, up to there."""
    return text[max(text.rfind(b"\n", 0, at) + 1, at - _LINE_BYTES) : at]


def _line_end(text: bytes, at: int) -> bytes:
    """The line of byte `at`, from there."""
    return text[at : at + _LINE_BYTES].partition(b"\n")[0]


def _goes_on(old: bytes, new: bytes, at: int) -> bool:
    """Whether neither text ends at byte `at`."""
    return at < len(old) and at < len(new)
