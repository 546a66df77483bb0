"""The stages of a request on its way through a node, and how long each took.

`bench/lib/warm/wrapped_processes/sitecustomize.py` writes the spans. At each moment the stage is
that of the innermost span: the one of all open spans, in all processes, that began last. So the
stages of a request add up to its time. Time in no span is `between`: sockets, event loops,
wake-ups of other processes.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

FORWARD = "forward"
BETWEEN = "between"
TOKENIZE, TEMPLATE = "engine tokenize", "engine template"

_OPENAI = "sglang.srt.entrypoints.openai"
_CHAT = f"{_OPENAI}.serving_chat:OpenAIServingChat"
_RESPONSES = f"{_OPENAI}.serving_responses:OpenAIServingResponses"
_ANTHROPIC = "sglang.srt.entrypoints.anthropic.serving:AnthropicServing"
_MANAGERS = "sglang.srt.managers"
_TOKENIZERS = f"{_MANAGERS}.tokenizer_manager:TokenizerManager"
_SCHEDULER = f"{_MANAGERS}.scheduler:Scheduler"
_CACHE = "sglang.srt.mem_cache"

SHARED = {
    "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol.data_received": "engine read",
    "starlette.requests:Request.body": "engine read",
    "sglang.srt.entrypoints.http_server:ORJSONRequest.json": "engine parse",
    "fastapi.routing:solve_dependencies": "engine validation",
    f"{_ANTHROPIC}._convert_to_chat_completion_request": "engine conversion",
    f"{_CHAT}._validate_request": "engine validation",
    f"{_CHAT}._convert_to_internal_request": "engine conversion",
    f"{_RESPONSES}._make_request": "engine conversion",
    f"{_CHAT}._process_messages": "engine messages",
    f"{_CHAT}._render_and_encode_chat_template": TOKENIZE,
    "transformers.tokenization_utils_base:PreTrainedTokenizerBase.apply_chat_template": TEMPLATE,
    f"{_TOKENIZERS}._tokenize_one_request": "engine request",
    f"{_TOKENIZERS}._dispatch_to_scheduler": "IPC send",
    f"{_MANAGERS}.scheduler_components.request_receiver:SchedulerRequestReceiver.recv_requests": (
        "IPC receive"
    ),
    f"{_SCHEDULER}.process_input_requests": "scheduler receive",
    f"{_SCHEDULER}.get_next_batch_to_run": "scheduler plan",
    f"{_CACHE}.radix_cache:RadixCache.match_prefix": "match",
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache.match_prefix": "match",
    f"{_MANAGERS}.schedule_batch:ScheduleBatch.prepare_for_extend": "allocate",
    f"{_SCHEDULER}.run_batch": "scheduler run",
    "sglang.srt.model_executor.model_runner:ModelRunner.forward": FORWARD,
    "sglang.srt.model_executor.model_runner:ModelRunner.sample": "sample",
    f"{_SCHEDULER}.process_batch_result": "scheduler result",
    f"{_CACHE}.radix_cache:RadixCache.insert": "cache",
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache.insert": "cache",
    f"{_MANAGERS}.detokenizer_manager:DetokenizerManager.handle_batch_token_id_out": "detokenize",
    f"{_TOKENIZERS}._handle_batch_output": "stream",
}
"""Functions of SGLang and of its HTTP server."""

OURS = {
    "sgl_ext.balancer.http.downstream:DownstreamConnection.buffer_updated": "balancer read",
    "sgl_ext.balancer.relay.reading:BodyReader.read": "balancer parse",
    "sgl_ext.balancer.relay.reading:read_prompt": "balancer segments",
    "sgl_ext.balancer.routing.admission:AdmissionQueue.place": "balancer route",
    "sgl_ext.balancer.http.upstream:UpstreamConnection.send": "balancer proxy",
    "sgl_ext.balancer.http.upstream:UpstreamConnection.data_received": "balancer answer",
    "sgl_ext.engine.http.request_hook:read_body": "engine segments",
    "sgl_ext.engine.http.pin_placement:place_pins": "engine marks",
    "sgl_ext.engine.http.pin_placement:place_pins_of_response": "engine marks",
    "sgl_ext.engine.http.request_hook:send_hints": "engine hints",
    "sgl_ext.engine.scheduler.iteration:publish_events": "scheduler events",
    "sgl_ext.engine.scheduler.iteration:take_orders": "scheduler events",
    "sgl_ext.engine.scheduler.priority:order_queue": "scheduler order",
    # The output is sent: the turn waits for the HTTP process, not for this.
    "sgl_ext.engine.scheduler.first_token:Deferred.run": BETWEEN,
}
"""Functions of ours."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A stage in one process, in nanoseconds of the clock that all share."""

    begin_ns: int
    end_ns: int
    stage: str


class Stopwatch:
    """A folder into which a node's processes write their spans."""

    def __init__(self, folder: Path, symbols: Mapping[str, str]) -> None:
        self._folder = folder / "spans"
        self._folder.mkdir(parents=True)
        self._stages = sorted(set(symbols.values()))
        table = folder / "table.json"
        names = {stage: str(number) for number, stage in enumerate(self._stages)}
        numbered = {symbol: names[stage] for symbol, stage in symbols.items()}
        table.write_text(json.dumps({"folder": str(self._folder), "symbols": numbered}))
        path = [str(Path(__file__).parent / "wrapped_processes"), os.environ.get("PYTHONPATH", "")]
        self.environment = {
            "SGLEXT_STAGES": str(table),
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
        }

    def spans(self) -> list[Span]:
        """All spans so far, in order of their beginnings.

        Raises RuntimeError if a function of the table does not exist.
        """
        found = []
        for file in self._folder.iterdir():
            for line in file.read_text().splitlines():
                if line.startswith("!"):
                    raise RuntimeError(f"the function to time does not exist: {line[1:]}")
                stage, begin, end = line.split()
                found.append(Span(int(begin), int(end), self._stages[int(stage)]))
        return sorted(found)


def stages_ms(spans: Iterable[Span], begin_ns: int, end_ns: int) -> dict[str, float]:
    """The milliseconds of each stage, and of none, from `begin_ns` to `end_ns`.

    Only the first forward pass counts: the first token does not wait for a second one.
    """
    near = [span for span in spans if span.begin_ns < end_ns and span.end_ns > begin_ns]
    passes = [span for span in near if span.stage == FORWARD]
    near = [span for span in near if span not in passes[1:]]
    edges = {begin_ns, end_ns}
    for span in near:
        edges |= {max(span.begin_ns, begin_ns), min(span.end_ns, end_ns)}
    total: dict[str, float] = defaultdict(float)
    moments = sorted(edges)
    for begin, end in pairwise(moments):
        open_ones = [span for span in near if span.begin_ns <= begin and span.end_ns >= end]
        stage = max(open_ones).stage if open_ones else BETWEEN
        total[stage] += (end - begin) / 1e6
    return total


def medians(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each stage's median over turns; a turn without the stage counts as 0."""
    names = sorted({name for turn in turns for name in turn})
    return {name: statistics.median(turn.get(name, 0.0) for turn in turns) for name in names}
