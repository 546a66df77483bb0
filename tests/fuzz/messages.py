"""HTTP/1.1 messages for the fuzzer: well-formed ones, and mutations of them.

Everything is drawn from one `random.Random`, so a seed names a case.
"""

from __future__ import annotations

import re
from random import Random

_METHODS = [
    *(b"GET", b"POST", b"HEAD", b"PUT", b"DELETE", b"OPTIONS"),
]
_TARGETS = [
    *(b"/", b"/v1/messages", b"/v1/messages?beta=true", b"/v1/loads", b"/a/b;c=d?e=f&g"),
    *(b"http://here/a?b", b"HTTP://here", b"http://here:1?c", b"/%41%2f", b"//x", b"/."),
]
_ODD_TARGETS = [
    *(b"*", b"here:80", b"a", b"", b"/v1/loads#x", b"/#", b"http://here/a#b", b"http://"),
    *(b"http:///x", b"/\xc3\xa9", b"/a b", b"/\x00", b"/\x7f", b"/\t", b"https://here/"),
    *(b"http://u@here/", b"http://here:99999999/", b"/\\", b'/"<>', b"/" + b"x" * 9000),
    *(b"http://[::1]/a", b"http://a b/"),
]
_VERSIONS = [b"HTTP/1.1"] * 12 + [b"HTTP/1.0"]
_LINES = [
    *(b"Accept: */*", b"X-A: 1", b"x-a: 2", b"X-B:", b"X-C:no-space", b"X-D: trailing \t "),
    *(b"X-E:\t tab", b"Content-Type: application/json", b"Connection: close"),
    *(b"Connection: keep-alive, X-A", b"Connection: x-d, ,x-b", b"Expect: 100-continue"),
    *(b"Authorization: Bearer s", b"TE: trailers", b"X-F: \xe9\xff", b"X-Long: " + b"y" * 300),
    *(b"Keep-Alive: 5", b"Content-Encoding: gzip"),
]
_ODD_LINES = [
    *(b"Content-Length: 3", b"Content-Length: 0", b"Content-Length: 5, 5"),
    *(b"Content-Length: +5", b"Content-Length: -1", b"Content-Length: 0x5", b"Content-Length:"),
    *(b"Content-Length: 00003", b"Content-Length: 18446744073709551619", b"Content-Length: 3 "),
    *(b"Content-Length : 3", b"Content-Length:\t3", b"content-length: 1_0"),
    *(b"Content-Length: \xb2", b"Content-Length: 3;a", b"Transfer-Encoding: chunked"),
    *(b"Transfer-Encoding: Chunked ", b"Transfer-Encoding: gzip, chunked"),
    *(b"Transfer-Encoding: chunked, chunked", b"Transfer-Encoding: identity"),
    *(b"Transfer-Encoding:", b"Transfer-Encoding: \x0bchunked"),
    *(b"Transfer-Encoding: chunked;q=1", b"Transfer-Encoding : chunked"),
    *(b"Transfer_Encoding: chunked", b"Transfer-Encoding:,chunked"),
    *(b"Transfer-Encoding: xchunked", b"X A: 1", b": empty", b"no colon", b" folded"),
    *(b"\tfolded", b"X-N: a\x00b", b"X-R: a\rb", b"X-L: a\nb", b"\xc3\xa9: 1", b"X-V: \x0b"),
    *(b"X-Z: \x7f", b"Host: other", b"Host: a b", b"Upgrade: h2c", b"Connection:"),
    *(b"Upgrade: websocket\r\nConnection: upgrade", b"Connection: close, keep-alive"),
    *(b"Connection: upgrade", b"Connection: host, content-length", b"Proxy-Connection: close"),
    *(b"Connection: transfer-encoding",),
]
_ENDS = [
    *(b"\n", b"\r", b"\r\r\n", b"\n\r", b"\r\n\r\n", b" \r\n", b"\r\n ", b"\x00\r\n", b", "),
]
_BYTES = [bytes([code]) for code in (0, 9, 10, 11, 12, 13, 32, 35, 44, 58, 59, 127, 133, 160, 255)]
_SIZES = [
    *(b"+3", b"-3", b"0x3", b"3 ", b" 3", b"03", b"3_0", b"ffffffffffffffff"),
    *(b"10000000000000003", b"fffffffff", b"", b"g", b"\xb2", b"3\t", b"00"),
    *(b"00000000000000000003", b"3;", b"3;a=b;c", b'3;a="b;\\"c"', b"3 ;a", b"3;\n"),
    *(b"3,3", b"3;\x00", b"3;" + b"e" * 200, b"0;x=y"),
]
_TRAILERS = [
    *(b"", b"", b"", b"X-T: 1\r\n", b"X-T: 1\r\nX-U:\r\n", b"Content-Length: 5\r\n"),
    *(b"transfer-encoding: gzip\r\n", b"x\r\n", b" x: 1\r\n"),
]
_STATUS_LINES = [
    *(b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK", b"HTTP/1.1 404 Not Found"),
    *(b"HTTP/1.0 200 OK", b"HTTP/1.1 204 None", b"HTTP/1.1 304 Same", b"HTTP/1.1 500 "),
    *(b"HTTP/1.1 200", b"HTTP/1.1 206 \xe9"),
]
_ODD_STATUS_LINES = [
    *(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK", b"HTTP/1.1 101 Up", b"HTTP/1.1 99 Low"),
    *(b"HTTP/2 200", b"HTTP/1.1 1000 High", b"HTTP/1.1 +20 OK", b"HTTP/1.1  200 OK"),
    *(b"HTTP/1.2 200 OK", b"http/1.1 200 OK", b"HTTP/1.1 200\tOK", b"ICY 200 OK"),
    *(b"HTTP/1.1 205 Reset", b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 204 -"),
]
_ANSWER_LINES = [
    *(b"Content-Type: application/json", b"Content-Type: text/event-stream", b"X-A: 1"),
    *(b"x-a: 2", b"X-B:", b"Connection: close", b"Connection: x-a", b"Connection: keep-alive"),
    *(b"Trailer: x-t", b"Server: \xff", b"Content-Type: text/event-stream", b"X-Request-Id: 5"),
    *(b"Keep-Alive: timeout=5",),
]
_LINE_END = re.compile(rb"\r\n")
_SIZE_LINE = re.compile(rb"(?<=\n)[0-9a-f]+(?=\r\n)")
_LENGTH = re.compile(rb"(?i)content-length: [0-9]+")


def request_stream(chance: Random) -> bytes:
    """One to three requests, most of them mutated."""
    stream = b"".join([_request(chance) for _ in range(chance.choice((1, 1, 1, 2, 3)))])
    return _mutated(chance, stream)


def answer(chance: Random) -> bytes:
    """One answer of an engine, mostly mutated."""
    start = chance.choice(_ODD_STATUS_LINES if chance.random() < 0.1 else _STATUS_LINES)
    lines = chance.choices(_ANSWER_LINES, k=chance.randrange(4))
    return _mutated(chance, _framed(chance, start, lines, chance.random() < 0.2))


def pieces(chance: Random, stream: bytes) -> list[bytes]:
    """The stream as it might arrive: at once, in a few parts, or byte by byte."""
    kind = chance.random()
    if kind < 0.4:
        return [stream]
    if kind > 0.95 and len(stream) < 1000:
        return [stream[at : at + 1] for at in range(len(stream))]
    cuts = sorted(chance.choices(range(len(stream) + 1), k=chance.randrange(1, 5)))
    return [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


def _request(chance: Random) -> bytes:
    target = chance.choice(_ODD_TARGETS if chance.random() < 0.04 else _TARGETS)
    start = b"%b %b %b" % (chance.choice(_METHODS), target, chance.choice(_VERSIONS))
    lines = chance.choices(_LINES, k=chance.randrange(4))
    if chance.random() < 0.9:
        lines.insert(chance.randrange(len(lines) + 1), b"Host: here")
    return _framed(chance, start, lines, chance.random() < 0.3)


def _framed(chance: Random, start: bytes, lines: list[bytes], is_bare: bool) -> bytes:
    body = b""
    if not is_bare:
        content = chance.choice(
            (b"", b"abc", b"{}", b"data: 1\n\n", b"GET /x HTTP/1.1\r\n\r\n", b"z" * 30)
        )
        at = chance.randrange(len(lines) + 1)
        if chance.random() < 0.5:
            name = chance.choice((b"Content-Length", b"content-length"))
            lines.insert(at, b"%b: %d" % (name, len(content)))
            body = content
        else:
            lines.insert(at, b"Transfer-Encoding: chunked")
            half = len(content) // 2
            chunks = [b"%x\r\n%b\r\n" % (len(c), c) for c in (content[:half], content[half:]) if c]
            body = b"%b0\r\n%b\r\n" % (b"".join(chunks), chance.choice(_TRAILERS))
    return b"\r\n".join([start, *lines, b"", body])


def _mutated(chance: Random, stream: bytes) -> bytes:
    for _ in range(chance.choice((0, 0, 1, 1, 1, 2, 3))):
        stream = chance.choice(_MUTATIONS)(chance, stream)
    return stream


def _at_match(chance: Random, pattern: re.Pattern[bytes], stream: bytes, new: bytes) -> bytes:
    """The stream with one match, chosen by chance, replaced."""
    spans = [match.span() for match in pattern.finditer(stream)]
    if not spans:
        return stream
    start, end = chance.choice(spans)
    return stream[:start] + new + stream[end:]


def _add_line(chance: Random, stream: bytes) -> bytes:
    lines = _ODD_LINES if chance.random() < 0.7 else _LINES
    return _at_match(chance, _LINE_END, stream, b"\r\n%b\r\n" % chance.choice(lines))


def _repeat_line(chance: Random, stream: bytes) -> bytes:
    lines = stream.split(b"\r\n")
    at = chance.randrange(len(lines))
    return b"\r\n".join([*lines[: at + 1], *lines[at:]])


def _other_length(chance: Random, stream: bytes) -> bytes:
    return _at_match(chance, _LENGTH, stream, chance.choice(_ODD_LINES[:15]))


def _other_end(chance: Random, stream: bytes) -> bytes:
    return _at_match(chance, _LINE_END, stream, chance.choice(_ENDS))


def _other_size(chance: Random, stream: bytes) -> bytes:
    return _at_match(chance, _SIZE_LINE, stream, chance.choice(_SIZES))


def _insert_byte(chance: Random, stream: bytes) -> bytes:
    at = chance.randrange(len(stream) + 1)
    return stream[:at] + chance.choice(_BYTES) + stream[at:]


def _other_byte(chance: Random, stream: bytes) -> bytes:
    at = chance.randrange(len(stream) + 1)
    return stream[:at] + chance.choice(_BYTES) + stream[at + 1 :]


def _random_byte(chance: Random, stream: bytes) -> bytes:
    at = chance.randrange(len(stream) + 1)
    return stream[:at] + bytes([chance.randrange(256)]) + stream[at + 1 :]


def _cut_out(chance: Random, stream: bytes) -> bytes:
    at = chance.randrange(len(stream) + 1)
    return stream[:at] + stream[at + chance.randrange(1, 4) :]


def _end_early(chance: Random, stream: bytes) -> bytes:
    return stream[: chance.randrange(len(stream) + 1)]


def _surround(chance: Random, stream: bytes) -> bytes:
    extra = chance.choice(
        (b"\r\n", b"\n", b"\r\n\r\n", b" ", b"\x00", b"GET / HTTP/1.1\r\n\r\n", b"0\r\n\r\n")
    )
    return extra + stream if chance.random() < 0.5 else stream + extra


_MUTATIONS = [
    *(_add_line, _add_line, _add_line, _repeat_line, _other_length, _other_length, _other_end),
    *(_other_size, _other_size, _insert_byte, _other_byte, _random_byte, _cut_out, _end_early),
    *(_surround,),
]
