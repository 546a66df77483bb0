"""Shows where prompts diverge from earlier ones, by a request log or a running balancer.

    sgl-ext doctor .run/requests.jsonl
    sgl-ext doctor --url http://127.0.0.1:30000
    sgl-ext doctor compare before.log after.log

Exit code 0: no prompt diverges. 1: prompts diverge. 2: the log or the balancer cannot be read.
"""

import http.client
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from sgl_ext.arguments import Arguments
from sgl_ext.doctor.comparison import compare_logs
from sgl_ext.doctor.report import add_advice, as_text
from sgl_ext.doctor.request_log import NotALog, readable
from sgl_ext.prompts.findings import Findings, merged
from sgl_ext.settings.schema import SettingsError
from sgl_ext.settings.secrets import read_api_key

_PATH = "/sgl_ext/divergences"
_TIMEOUT_S = 30.0


class DoctorError(Exception):
    """The findings cannot be read; the message says why."""


def main(argv: Sequence[str]) -> int:
    """Prints the report and returns the exit code."""
    if list(argv[:1]) == ["compare"]:
        return compare_logs(argv[1:])
    parser = Arguments(
        prog="sgl-ext doctor",
        allow_abbrev=False,
        description="Shows where prompts diverge from earlier ones, and what to do about it.",
    )
    parser.add_argument("log", nargs="?", metavar="LOG", help="a request log; - is stdin")
    parser.add_argument("--url", help="a balancer that runs with --diagnose or --request-log")
    parser.add_argument("--api-key", help="file:PATH or env:VARIABLE, for --url")
    parser.add_argument("--json", action="store_true", help="print JSON")
    flags = parser.parse_args(argv)
    if (flags.log is None) == (flags.url is None):
        parser.error("give LOG or --url")
    try:
        if flags.url is None:
            document = read_log(flags.log)
        else:
            document = fetch(flags.url, read_api_key(flags.api_key))
    except (DoctorError, SettingsError) as error:
        print(f"sgl-ext doctor: {error}", file=sys.stderr)
        return 2
    add_advice(document)
    if flags.json:
        print(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    else:
        print(as_text(document), end="")
    return int(any(harness["findings"] for harness in document["harnesses"]))


def read_log(path: str) -> dict[str, Any]:
    """The findings of a request log. Raises DoctorError if it cannot be read."""
    try:
        with sys.stdin.buffer if path == "-" else Path(path).open("rb") as lines:
            return summed(lines)
    except OSError as error:
        raise DoctorError(f"{path}: {error.strerror}") from None


def summed(lines: Iterable[bytes]) -> dict[str, Any]:
    """The findings of a log's lines. Raises DoctorError if no line is from a request log."""
    findings = Findings()

    def add(line: bytes) -> None:
        record = orjson.loads(line)
        harness, model = record["harness"], record["model"] or ""
        tokens, divergence = int(record["prompt_tokens"]), record["divergence"]
        if harness is not None and tokens and record.get("outcome", "complete") == "complete":
            findings.add(str(harness), str(model), tokens, divergence)

    try:
        for _ in readable(lines, add, "sgl-ext doctor"):
            pass
    except NotALog as error:
        raise DoctorError(str(error)) from None
    return findings.as_json()


def fetch(url: str, key: str | None) -> dict[str, Any]:
    """The findings of a balancer. Raises DoctorError if it does not answer with them."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        request = urllib.request.Request(url.rstrip("/") + _PATH, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            document = orjson.loads(answer.read())
            return {**merged([document]), "with_less": document.get("with_less", {})}
    except urllib.error.HTTPError as error:
        with error:
            raise DoctorError(f"{url}: {error.code}: {_message(error.read())}") from None
    except (OSError, http.client.HTTPException) as error:
        raise DoctorError(f"{url}: {getattr(error, 'reason', error)}") from None
    except (ValueError, TypeError, KeyError):
        raise DoctorError(f"{url}: the answer is not that of a balancer") from None


def _message(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return "no reason given"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
