"""What sgl-ext needs of the host, and what it saves: bounds of its tables, and measured figures."""

from bisect import bisect_left
from dataclasses import asdict, dataclass

from sgl_ext.settings.schema import BalancerSettings, EngineSettings

_MIB = 1 << 20
# docs/how/prefix-index.md and docs/reference/limits.md.
_SEGMENT_BYTES = 70
_SEGMENT_TOKENS = 1024
_TABLES_BYTES = (64 + 64) * _MIB
_LOG_BYTES = 256 * _MIB
# The balancer's estimate until requests show better.
_TEXT_BYTES_PER_TOKEN = 4
# Measured on 2 CPU cores without a GPU, by bench/warm_turn. Tokens of a warm turn, and the host
# time in milliseconds of plain SGLang and of an engine and a balancer of sgl-ext.
WARM_TURNS = ((6_100, 36, 11), (16_400, 40, 14), (50_900, 86, 19), (125_000, 171, 27))
# The balancer's processor time in milliseconds: for 2 KB (bench/proxy), and in the turn of
# 50.9K tokens.
_BALANCER_MS = ((500, 0.19), (50_900, 1.7))


@dataclass(frozen=True)
class HostNeeds:
    """Upper bounds in bytes, by the default settings."""

    balancer_index_bytes: int
    balancer_bodies_bytes: int
    balancer_tables_bytes: int
    engine_token_cache_bytes: int
    store_bytes: int
    store_conversations: int
    request_log_bytes: int
    process_logs_bytes: int


@dataclass(frozen=True)
class Load:
    """What a warm turn of this length costs and saves. None: beyond what was measured."""

    balancer_ms: float
    requests_per_s_and_process: float
    host_ms_stock: float | None
    host_ms: float | None


def host_needs(engines: int, tokens: int, context: int) -> HostNeeds:
    """For a node with engines of `tokens` each, and sessions of `context` tokens."""
    balancer, engine = BalancerSettings(), EngineSettings()
    segments = engines * (tokens // _SEGMENT_TOKENS)
    store = balancer.store_limit_bytes
    return HostNeeds(
        balancer_index_bytes=min(segments * _SEGMENT_BYTES, balancer.index_limit_bytes),
        balancer_bodies_bytes=balancer.account_bytes,
        balancer_tables_bytes=_TABLES_BYTES,
        engine_token_cache_bytes=engine.token_cache_bytes,
        store_bytes=store,
        store_conversations=store // (context * _TEXT_BYTES_PER_TOKEN),
        request_log_bytes=balancer.request_log_limit_bytes,
        process_logs_bytes=(engines + 1) * _LOG_BYTES,
    )


def load_of(context: int) -> Load:
    """Between measured lengths, in proportion."""
    (first, least), (last, most) = _BALANCER_MS
    balancer = least + (most - least) * max(0, context - first) / (last - first)
    stock, ours = _between(context, 1), _between(context, 2)
    return Load(round(balancer, 2), round(1000 / balancer), stock, ours)


def as_json(part: HostNeeds | Load) -> dict[str, float | None]:
    return asdict(part)


def _between(context: int, column: int) -> float | None:
    lengths = [row[0] for row in WARM_TURNS]
    at = bisect_left(lengths, context)
    if at == len(lengths):
        return None
    if at == 0:
        return float(WARM_TURNS[0][column]) if context == lengths[0] else None
    low, high = WARM_TURNS[at - 1], WARM_TURNS[at]
    part = (context - low[0]) / (high[0] - low[0])
    return round(low[column] + part * (high[column] - low[column]), 1)
