"""Names the known vulnerabilities of the installed packages.

    python -m launch.audit [URL]

One request to the OSV database names all packages that came from a registry, with their versions.
It reports and never fails. If the database does not answer within LIMIT_S, or the URL is empty, one
line says so.
"""

import json
import sys
import urllib.request
from importlib.metadata import distributions
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

URL = "https://api.osv.dev/v1/querybatch"
LIMIT_S = 3.0


def installed() -> list[tuple[str, str]]:
    """Names and versions of the packages of this environment, without local ones."""
    found = {
        (each.metadata["Name"], each.version)
        for each in distributions()
        if each.read_text("direct_url.json") is None
    }
    return sorted(found)


def known(url: str, packages: list[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    """The ids of each package's known vulnerabilities, without packages that have none.

    Raises OSError if the database cannot be reached, ValueError or LookupError if its answer
    cannot be read.
    """
    queries = [
        {"package": {"name": name, "ecosystem": "PyPI"}, "version": version}
        for name, version in packages
    ]
    data = json.dumps({"queries": queries}).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        results = json.load(answer)["results"]
    pairs = zip(packages, results, strict=True)
    return {
        package: [each["id"] for each in result["vulns"]] for package, result in pairs if result
    }


def report(url: str, packages: list[tuple[str, str]]) -> list[str]:
    """The lines to print."""
    if not url:
        return ["audit: skipped, no database is set"]
    answers: SimpleQueue[Any] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put(known(url, packages))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            answers.put(error)

    # A name server that does not answer is outside of the request's own time-out.
    Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=LIMIT_S)
    except Empty:
        answer = TimeoutError(f"no answer within {LIMIT_S:g} s")
    if isinstance(answer, Exception):
        return [f"audit: skipped, the database gave no answer: {answer}"]
    lines = [
        f"audit: {name} {version}: {', '.join(ids)}" for (name, version), ids in answer.items()
    ]
    return [*lines, f"audit: {len(answer)} of {len(packages)} packages have known vulnerabilities"]


if __name__ == "__main__":
    print("\n".join(report(sys.argv[1] if len(sys.argv) > 1 else URL, installed())))
