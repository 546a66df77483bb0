"""What the tables of tokens really take is within their bounds, by the memory of a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMIT = 32 << 20
MEASURED = """
import random, sys
from array import array
from radix.byte_lru import ByteLRU
from radix.known_tokens import TokenPieces
from radix.known_tokens import Cut, PromptHistory

def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

limit, ids, draw = int(sys.argv[1]), array("q", range(20_000)), random.Random(0)
before = status("VmRSS")
{}
made.check()
print(len(made), status("VmHWM") - before)
"""
FILLED = {
    "short pieces": """
made = TokenPieces(limit)
for number in range(300_000):
    made.add_ids(made.key("<|im_start|>", str(number)), ids[: number % 40])
""",
    "pieces of all lengths": """
made = TokenPieces(limit)
for number in range(100_000):
    length = min(int(20 * draw.paretovariate(0.7)), len(ids))
    made.add_ids(made.key("<|im_start|>", str(number)), ids[:length])
""",
    "prompts": """
made = PromptHistory(limit, 12)
for number in range(2_000):
    length = draw.randrange(1_000, len(ids))
    cuts = [Cut(length + 100 * n, 500 + 10 * n, "<|im_start|>") for n in range(7)]
    made.add("", f"{number:07}" * (length // 2), ids[:length], cuts)
""",
    "entries of a cache": """
made = ByteLRU(limit)
for number in range(200_000):
    text = "It says: " * (number % 40)
    made.add(("group", number), text, sys.getsizeof(text))
""",
}


@pytest.mark.parametrize("filled", FILLED.values(), ids=FILLED)
def test_memory_is_within_the_bound(filled: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURED.format(filled), str(LIMIT)],
        capture_output=True,
        text=True,
        check=True,
    )
    entries, most_bytes = map(int, done.stdout.split())
    assert LIMIT // 2 < most_bytes <= LIMIT, entries
