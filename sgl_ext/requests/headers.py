"""The strip of one text: leading session headers are removed, everything else stays.

A coding agent may begin its system prompt with a line such as

    x-anthropic-billing-header: cc_version=2.1.197.3af; cc_entrypoint=sdk-cli;

whose values change with the session or the request. At token 0 it makes every prefix unique. The
grammar of what is removed:

    header = *white-space  NAME ":"  1*field  [ *blank line-end ]
    field  = *blank  key "=" value ";"
    key    = 1*( letter | digit | "_" | "." | "-" )      value = *( neither ";" nor white space )

The last field of a line may lack its ";" if a blank (or the colon) precedes it and the line ends
after it. If text follows the fields on the same line, the header ends right after the last ";"
and the text stays byte for byte, its leading blanks included. Keys and values contain no white
space, so prose after the fields is not mistaken for a field. A NAME without any field is prose
too, and stays. Several headers in a row are all removed.

Invariants: `strip(strip(t)) == strip(t)`; a text without a header is returned as the same object;
the result is always a suffix of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

BILLING_HEADER = "x-anthropic-billing-header"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*\Z")


class StrippedText(NamedTuple):
    """The rest of a text, the number of headers removed, and their fields (later wins)."""

    text: str
    headers: int
    fields: dict[str, str]


class HeaderStrip:
    """Removes leading headers of the given names from a text.

    Names match in any case. Raises ValueError for a name that is not letters, digits and hyphens.
    """

    def __init__(self, names: Iterable[str] = (BILLING_HEADER,)) -> None:
        lower = tuple(dict.fromkeys(name.lower() for name in names))
        for name in lower:
            if not _NAME.match(name):
                raise ValueError(f"not a header name: {name!r}")
        alternatives = "|".join(re.escape(name) for name in lower) or r"(?!)"
        field, line_end = r"[A-Za-z0-9_.-]+=[^;\s]*", r"[ \t]*(?:\r\n|\n|\r|\Z)"
        self._header = re.compile(
            rf"\s*(?:{alternatives}):"
            rf"(?P<fields>(?:[ \t]*{field};)*(?:(?:(?<=:)|[ \t])[ \t]*{field}(?={line_end}))?)"
            rf"(?:{line_end})?",
            re.IGNORECASE,
        )
        self._needles = tuple(
            cased.encode() for name in lower for cased in {name, name.upper(), name.title()}
        )

    def strip(self, text: str) -> StrippedText:
        """Removes every header at the beginning of `text`."""
        start, headers, fields = 0, 0, {}
        while match := self._header.match(text, start):
            found = match["fields"]
            if not found:
                break
            for field in found.split(";"):
                key, separator, value = field.strip().partition("=")
                if separator:
                    fields[key] = value
            headers += 1
            start = match.end()
        return StrippedText(text[start:] if start else text, headers, fields)

    def mentions(self, raw: bytes) -> int:
        """How often a header's name occurs in `raw`, in lower, upper or title case.

        A count for a metric. Names in mixed case are stripped, too, but not counted here: folding
        the case of a whole body costs more than reading it.
        """
        return sum(map(raw.count, self._needles))
