"""Names of arms as a reader knows them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

OURS = "sgl-ext"
_LABELS = {
    "ours": OURS,
    "stock": "SGLang",
    "fcfs": "SGLang",
    "stock_priority": "SGLang, priority scheduling",
    "pinned": f"{OURS}, pinned",
    "stock_session": "SGLang, session radix cache",
    "stock_hicache": "SGLang, HiCache",
    "off": "no prefill ahead",
    "naive": "prefill ahead by the client",
    "sglang_router": "sglang-router",
    "vllm_router": "vllm-router",
    "ours_fcfs": f"{OURS}, engines FCFS",
    "round_robin": "smg, round robin",
    "least_loaded": "smg, least loaded",
    "smg": "smg",
    "nginx": "nginx",
    "dynamo": "Dynamo's index",
}
# In bench/pin_flood, this arm has the priority policy of eviction.
PIN_LABELS = {"stock_priority": "SGLang, priority eviction"}
RESTART_LABELS = {
    "stock_file": "SGLang, HiCache on files",
    "ours_memory": f"{OURS}, tier in memory",
    "ours": f"{OURS}, tier on a disk",
}
RECORDED_LABELS = {
    "ours": OURS,
    "ours_1h": f"{OURS}, marks of an hour",
    "ours_hicache": f"{OURS}, HiCache",
    "hicache": "SGLang, HiCache",
    "fixed_ttl": f"{OURS}, nothing held back",
    "session_radix": "SGLang, session radix cache",
    "sglang_router": "cache_aware (sglang-router, smg)",
    "vllm_router": "sticky (vllm-router)",
    "llm_d": "sticky until saturated (llm-d)",
    "dynamo": "Dynamo's agentic preset",
    "lmetric": "LMetric",
    "round_robin": "in turn",
}


def label(name: str, own: Mapping[str, str] = MappingProxyType({})) -> str:
    """The label of an arm; the name itself, in words, if there is none. own: of one bench."""
    return own.get(name) or _LABELS.get(name, name.replace("_", " "))
