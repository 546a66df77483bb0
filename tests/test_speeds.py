"""What `make test-speeds` reads in the reports of its runs."""

from __future__ import annotations

from tests.speeds import outcomes

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_well"/>
<testcase classname="tests.a" name="test_wrong[1]"><failure message="assert 1 == 2"/></testcase>
<testcase classname="tests.b" name="test_start"><error message="no engine"/></testcase>
<testcase classname="tests.b" name="test_gpu"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_failures_and_errors_are_named_and_skips_did_not_run() -> None:
    assert outcomes(REPORT) == (3, ["tests.a::test_wrong[1]", "tests.b::test_start"])
