"""What `make test-speeds` reads in the reports of its runs."""

from __future__ import annotations

from tests.speeds import outcomes, table

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_well"/>
<testcase classname="tests.a" name="test_wrong[1]"><failure message="assert 1 == 2"/></testcase>
<testcase classname="tests.b" name="test_start"><error message="no engine"/></testcase>
<testcase classname="tests.b" name="test_gpu"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_failures_and_errors_are_named_and_skips_did_not_run() -> None:
    assert outcomes(REPORT) == (3, ["tests.a::test_wrong[1]", "tests.b::test_start"])


def test_the_table_names_every_test_that_failed_once() -> None:
    assert table({}, ["slow"], 5) == "every test passed each of 5 times: slow"
    failures = {("slow", "tests.b::test_two"): 1, ("usual", "tests.a::test_one"): 4}
    assert table(failures, ["usual", "slow"], 5).splitlines() == [
        "| failed of 5 times | usual | slow |",
        "|---|---|---|",
        "| tests.a::test_one | 4 | 0 |",
        "| tests.b::test_two | 0 | 1 |",
    ]
