"""Differential fuzzing of the balancer's HTTP/1.1 against h11.

    python -m tests.fuzz.http --cases 10000000

Two questions, one case each in turn:

    a client's bytes   each request that the balancer accepts, h11 accepts with the same method,
                       target, headers, body, and end; and what the balancer would send to an
                       engine is, for h11, exactly this request
    an engine's bytes  each answer that the balancer passes on, h11 accepts with the same status,
                       headers and body; and what the client gets is exactly one answer for h11

The balancer may always be stricter. Where it is laxer, LAXER names the reason.
"""

from __future__ import annotations

import logging
from collections import Counter
from random import Random

from sgl_ext.balancer.http.request_head import RequestHeadCache
from tests.fuzz import messages
from tests.fuzz.client_side import check_requests
from tests.fuzz.command import main
from tests.fuzz.engine_side import check_answer
from tests.fuzz.oracle import Difference

# What the balancer accepts and h11 does not, and how the case is put to h11 instead.
LAXER = {
    "no host": "an engine gets the balancer's own Host line, so a client's decides nothing",
    "empty lines before a request": "RFC 9112, section 2.2, tells servers to ignore them",
    "line ends before an answer": "llhttp skips them, so they are no part of any answer",
    "over 20 digits in the size of an answer's chunk": "zeros before a number change nothing",
    "HTTP/1.0 keep-alive": "h11 knows it not; the balancer confirms it in its answer",
}


def run(first: int, cases: int, stop: bool = True) -> Counter[str]:
    """Runs cases by number; every other one is an engine's. Counts what was accepted.

    Raises Difference, naming the case and its bytes, at the first difference, unless not `stop`.
    """
    counts: Counter[str] = Counter()
    heads = RequestHeadCache(lambda head: None)
    for number in range(first, first + cases):
        chance = Random(number)
        is_answer = number % 2
        stream = (messages.answer if is_answer else messages.request_stream)(chance)
        parts = messages.pieces(chance, stream)
        try:
            if is_answer:
                method = chance.choice((b"GET", b"GET", b"GET", b"HEAD"))
                version = chance.choice((b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0"))
                counts["answers"] += 1
                counts["answers passed on"] += check_answer(stream, parts, method, version)
            else:
                counts["streams of requests"] += 1
                counts["requests accepted"] += check_requests(stream, parts, heads)
        except Difference as difference:
            message = f"case {number}: {difference}\n{stream!r}"
            if stop:
                raise Difference(message) from None
            counts["differences"] += 1
            print(message)
    return counts


if __name__ == "__main__":
    logging.getLogger("sgl_ext").setLevel(logging.CRITICAL)
    main(run, __doc__)
