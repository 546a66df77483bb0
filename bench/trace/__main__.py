"""Writes a trace in Mooncake's format, and its shape as one JSON object on stderr.

    python -m bench.trace --shape published_kind --seed 1 --sessions 200 > trace.jsonl

With `--trace` it writes a trace that it reads: cut to fewer sessions, scaled or paced.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from bench.trace.agents import TraceConfig
from bench.trace.calls import compile_calls
from bench.trace.mooncake import lines_of
from bench.trace.options import add_trace_options, trace_of
from bench.trace.recording import records_of
from bench.trace.shape import shape_of
from bench.trace.variants import make_trace


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_trace_options(parser)
    config = trace_of(parser, parser.parse_args(), TraceConfig())
    if config is None:
        parser.error("which trace? Give --shape or --trace")
    try:
        agents = make_trace(config)
    except (OSError, ValueError) as error:
        sys.exit(f"bench.trace: {error}")
    calls = compile_calls(agents)
    records = records_of(agents, calls)
    sys.stdout.writelines(lines_of(records))
    print(json.dumps(asdict(shape_of(agents, calls, records))), file=sys.stderr)


if __name__ == "__main__":
    main()
