"""Whether two texts differ in a clock, in an id, or in something else.

The words around the first byte that differs decide: the difference is a clock if both are in a
date or a time, and an id if both are in a UUID, a hexadecimal or a long number.
"""

import re

CLOCK, ID = "clock", "id"
_AROUND_BYTES = 64
_DAY = "(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
_MONTH = (
    "(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
    "|sep(?:t(?:ember)?)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)"
)
_ZONE = r"(?: ?(?:z|utc|gmt)\b|[+-]\d{2}:?\d{2})"
_TIME = rf"\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?(?: ?[ap]\.?m\b\.?)?{_ZONE}?"
_YEAR_LAST = r"\d{1,2}[-/.]\d{1,2}[-/.]\d{4}|\d{1,2}[-/]\d{1,2}[-/]\d{2}"
_DATE = (
    rf"(?:\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|{_YEAR_LAST}"
    rf"|{_MONTH}\.? \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?"
    rf"|\d{{1,2}}\.? {_MONTH}\.?(?:,? \d{{4}})?|{_MONTH} \d{{4}}|{_DAY})"
)
_CLOCK = re.compile(
    rf"(?<![0-9a-z]){_DATE}(?:[t, ]{{1,4}}(?:at )?(?:{_DATE}|{_TIME})){{0,2}}(?![0-9a-z])"
    rf"|(?<![0-9a-z:]){_TIME}(?![0-9a-z:])".encode(),
    re.IGNORECASE,
)
_UUID = re.compile(rb"(?<![0-9a-f])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_WORD = re.compile(rb"[0-9A-Za-z_]+")
_HEX = re.compile(rb"(?:0x)?[0-9a-f]{8,}", re.IGNORECASE)
_DIGITS = frozenset(b"0123456789")
# Seconds or milliseconds since the epoch, from 2017 on, at most a month apart.
_EPOCH = re.compile(rb"[12]\d{9}(?:\d{3})?")
_MONTH_S = 31 * 24 * 3600
_LONG_NUMBER = 6
# Mixed words of at least this length with at least this many digits.
_MIXED = ((8, 4), (16, 1))


def clock_or_id(old: bytes, new: bytes, at: int) -> str | None:
    """CLOCK, ID or None for two texts whose first difference is at byte `at`."""
    if _around(_UUID, old, at) and _around(_UUID, new, at):
        return ID
    left, right = _word(old, at), _word(new, at)
    if _are_epochs(left, right):
        return CLOCK
    if _around(_CLOCK, old, at) and _around(_CLOCK, new, at):
        return CLOCK
    if _is_id(left) and _is_id(right) and not _DIGITS.isdisjoint(left + right):
        return ID
    return None


def _around(pattern: re.Pattern[bytes], text: bytes, at: int) -> list[bytes]:
    """The matches of the pattern that contain byte `at`, or end right before it."""
    start = max(at - _AROUND_BYTES, 0)
    matches = pattern.finditer(text[start : at + _AROUND_BYTES])
    return [match[0] for match in matches if match.start() <= at - start <= match.end()]


def _word(text: bytes, at: int) -> bytes:
    """The word of letters and digits around byte `at`."""
    return max(_around(_WORD, text, at), key=len, default=b"")


def _is_id(word: bytes) -> bool:
    if word.isdigit():
        return len(word) >= _LONG_NUMBER
    if _HEX.fullmatch(word):
        return True
    digits = sum(byte in _DIGITS for byte in word)
    return any(len(word) >= size and digits >= few for size, few in _MIXED)


def _are_epochs(left: bytes, right: bytes) -> bool:
    if not (_EPOCH.fullmatch(left) and _EPOCH.fullmatch(right) and len(left) == len(right)):
        return False
    unit = 1 if len(left) == 10 else 1000
    return abs(int(left) - int(right)) <= _MONTH_S * unit and int(left) >= 1_500_000_000 * unit
