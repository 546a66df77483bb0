"""The tier that all engines of a machine share, as a storage of SGLang's HiCache.

An engine stores the pages of a prefix when it has copied them to its host memory. Another one that
is sent the same prefix reads them into its own host memory, in place of computing them.

    device <--> host memory <--> pages in shared memory <--> host memory <--> device
    one engine                   or on a disk                another one

SGLang names a page by the hash of all tokens up to its end and of the request's name space
(`extra_key`, `cache_salt`), so tenants do not meet here. Engines meet if they are alike: pages are
in a folder that is named by what must be equal (`identity`, `HostPages.form`).

Of SGLang's interfaces for storages this is V1. Its threads call it: one reads, one writes, one
looks pages up. The scheduler's own thread only hands segments over, and takes what reads took.

Stored pages end when an engine's weights change while it serves: nothing says which weights it has
later. A page is written from the host pool and read into it without a copy.

A pin's pages stay for its lease: other pages are evicted before them. A pin is granted before
its pages are written, so a lease waits until they are there.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ctypes import c_ubyte
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import orjson

from radix.residency_changes import Stored
from scheduler.tier_switch import Off, TierSwitch
from sgl_ext.engine import sglang_api
from sgl_ext.engine.arguments import in_effect
from sgl_ext.engine.core.counters import counter, gauge
from sgl_ext.engine.sglang_types import (
    CacheController,
    HostPool,
    ResolvedArgs,
    StorageConfig,
    StorageExtraInfo,
    Tensor,
    TreeCore,
)
from sgl_ext.engine.tiers.page_folder import NameSpace, PageFolder, Read, Written
from sgl_ext.engine.tiers.segment_notes import NoteWriter
from sgl_ext.settings.schema import SettingsError
from sgl_ext.settings.shared_tier import read_tier
from sgl_ext.sizing.model import SizingError, model_folder

# Equal tokens have other keys and values, or other bytes, if one of these differs.
_ARGUMENTS = (
    *("attention_backend", "decode_attention_backend", "prefill_attention_backend", "dtype"),
    *("chat_template", "tokenizer_path"),
    *("json_model_override_args", "kv_cache_dtype", "load_format", "model_impl"),
    *("model_loader_extra_config", "model_path", "quantization", "quantization_param_path"),
    "revision",
)
_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".jinja"}


def digest(*facts: Any) -> str:
    """A name for these facts, which may stand in a path."""
    return sha256(orjson.dumps(facts, default=repr)).hexdigest()[:32]


def engine_facts(args: ResolvedArgs) -> list[Any]:
    """The facts about SGLang, the model and its adapters."""
    adapters = [getattr(one, "lora_path", one) for one in args.lora_paths or ()]
    files = [[*_files(str(path))] for path in (args.model_path, *adapters)]
    return [version("sglang"), [str(getattr(args, name)) for name in _ARGUMENTS], files]


def _files(model: str) -> Iterator[tuple[str, int, int]]:
    """The files of a model with their sizes and times: weights may change in place."""
    with suppress(SizingError, OSError):
        folder = Path(model) if Path(model).is_dir() else model_folder(model)
        for path in sorted(folder.iterdir()):
            if path.suffix in _FILES:
                found = path.stat()
                yield path.name, found.st_size, found.st_mtime_ns


log = logging.getLogger(__name__)


class Storage(Protocol):
    def retire(self) -> None: ...


_storages: WeakSet[Storage] = WeakSet()


def note_storage(storage: Storage) -> None:
    """Notes a storage of this process, to be retired when weights change."""
    _storages.add(storage)


def retire(*_: Any, **__: Any) -> None:
    """Before `SchedulerWeightUpdaterManager.flush_cache_after_weight_update`: the storages of this
    process neither read nor write from now on."""
    for storage in _storages:
        storage.retire()
        log.warning("weights changed while serving: the shared tier is off until a restart")


# A subclass may have another layout.
_POOLS = ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost")
_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


class HostPages:
    """The pages of one host pool, each named by its first slot.

    tokens, bytes: of a page. form: what must be equal for one engine to read what another wrote.
    """

    def __init__(self, pool: HostPool) -> None:
        """Raises SettingsError for a pool whose pages lie in an unknown way."""
        kind = type(pool).__name__
        if kind not in _POOLS or pool.layout not in _LAYOUTS:
            known = f"engines share pages of {', '.join(_LAYOUTS)}, of {' and '.join(_POOLS)}"
            raise SettingsError(f"--hicache-mem-layout={pool.layout} of a {kind}: {known}")
        self._pool = pool
        self.tokens = pool.page_size
        self.bytes = sum(part.nbytes for part in self._parts(0))
        self.form = (
            *(kind, str(pool.dtype), self.tokens, self.bytes, pool.layout),
            *(pool.start_layer, pool.end_layer, pool.storage_format_tag),
        )

    def parts(self, slots: "Tensor") -> Iterator[list[memoryview]]:
        """The memory of each page that these slots make up."""
        for first in slots[:: self.tokens].tolist():
            yield self._parts(int(first))

    def _parts(self, first: int) -> list[memoryview]:
        slots = _Slots(range(first, first + self.tokens))
        addresses, sizes = self._pool.get_page_buffer_meta(slots)
        return [_memory(*part) for part in zip(addresses, sizes, strict=True)]


class _Slots(list[int]):
    """A list of slots with a tensor's `tolist`, which the pool calls."""

    def tolist(self) -> list[int]:
        return self


@cache
def _block(size: int) -> Any:
    return c_ubyte * size


def _memory(address: int, size: int) -> memoryview:
    return memoryview(_block(size).from_address(address)).cast("B")


_KV = "kv"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
# Pages of one prefix that are used within this time are evicted from its end.
_USED_TOGETHER_NS = 10_000_000_000
# Pages of the prefix before those of a call whose use is recorded with it.
_MOST_TOUCHED = 4096
_MOST_READS = 64
_MOST_LEASES = 64


_WORDS = {
    Off.FULL: "has no room: pages are read and not written",
    Off.FAILING: "cannot be read or written: it is off, and is tried again each minute",
    Off.BEHIND: "is slower than what is to be written: pages are left out until nothing waits",
}


class Lease(NamedTuple):
    """The pages of a pinned prefix, from its first one on, and until when they stay."""

    pages: Sequence[str]
    until_ns: int


class SharedPages(sglang_api.HiCacheStorage):
    """The storage of one rank of an engine. reads: tokens and seconds of the latest reads.

    switch: whether pages are read and written.
    """

    _pages: HostPages
    _space: NameSpace
    _notes: NoteWriter

    def __init__(self, config: StorageConfig, _: Any = None) -> None:
        folder, budget_bytes = read_tier(config.extra_config or {})
        _build_hash()
        self._config = config
        self._folder = PageFolder(folder, budget_bytes, _count_evicted)
        self._is_retired = False
        self._last_stored: str | None = None
        self.reads: deque[tuple[int, float]] = deque(maxlen=_MOST_READS)
        self.switch = TierSwitch()
        self._shown: Off | None = None
        self._leases: deque[Lease] = deque()
        gauge("table_limit").labels("shared_tier", "bytes").set(budget_bytes)
        note_storage(self)
        log.info("the tier shared by the engines of this machine is %s", folder)

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        super().register_mem_pool_host(mem_pool_host)
        config, self._pages = self._config, HostPages(mem_pool_host)
        shard = [config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size]
        # With multi-head latent attention all ranks have the same pages.
        shard += [config.tp_size, -1 if config.is_mla_model else config.tp_rank]
        facts = [*engine_facts(in_effect()), config.model_name, shard, *self._pages.form]
        self._space = self._folder.name_space(f"{_KV}-{digest(*facts)}")
        self._notes = NoteWriter(self._folder, self._space.path.name, self._pages.tokens)

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: str) -> None:
        if host_pool_name != _KV:
            reason = "engines share pages of keys and values alone, and this model has others"
            raise SettingsError(f"--hicache-storage-backend: pool {host_pool_name}: {reason}")

    @property
    def path(self) -> Path:
        """Where the pages are, of this rank and of those like it."""
        return self._space.path

    @property
    def machine(self) -> str:
        """A name for this tier: the same in all engines that share it, and in no others."""
        found = self.path.stat()
        return digest(_BOOT.read_text(), found.st_dev, found.st_ino)

    def note(self, segments: Sequence[Stored], tree: TreeCore, node: Any) -> None:
        """Notes where the segments of a prompt end. `node` is its last node in the tree."""
        if not self._is_retired:
            pages = tree.get_prefix_hash_values(node) + tree.get_hash_values(node)
            self._notes.add(segments, pages)

    def keep(self, tree: TreeCore, node: Any, left_s: float) -> None:
        """Keeps the pages of the prefix that ends at this node for so long."""
        if len(self._leases) == _MOST_LEASES:
            counter("shared_tier_leases_dropped").inc()
        elif not self._is_retired:
            pages = tree.get_prefix_hash_values(node) + tree.get_hash_values(node)
            self._leases.append(Lease(pages, time.time_ns() + int(left_s * 1e9)))

    def _apply_leases(self) -> None:
        """Applies the leases whose pages are there. The others wait until their end."""
        now_ns = time.time_ns()
        for _ in range(len(self._leases)):
            lease = self._leases.popleft()
            *before, last = lease.pages or [""]
            if self._space.keep(last, lease.until_ns - len(before)):
                for depth, page in enumerate(before):
                    self._space.keep(page, lease.until_ns - depth)
            elif now_ns < lease.until_ns:
                self._leases.append(lease)

    def batch_exists(self, keys: list[str], extra_info: StorageExtraInfo | None = None) -> int:
        """How many of the keys are there, counted from the first up to one that is not."""
        if self._is_retired or not self.switch.may_read(time.monotonic()):
            return 0
        there = (n for n, key in enumerate(keys) if self._space.used_ns(key) is None)
        found = next(there, len(keys))
        _count("missed", len(keys) - found)
        self._touch_prefix(_prefix(extra_info))
        self._notes.write(_used_ns())  # of prompts that add no page
        self._apply_leases()
        return found

    def batch_get_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: StorageExtraInfo | None = None
    ) -> list[bool]:
        """Reads pages into the pool's memory, up to the first that is not there or is corrupt."""
        began_s, used_ns = time.perf_counter(), _used_ns() - len(_prefix(extra_info))
        read, may_read = 0, self.switch.may_read(time.monotonic())
        if may_read and not self._is_retired:
            for key, parts in zip(keys, self._pages.parts(host_indices), strict=True):
                result = self._space.get(key, parts, used_ns - read)
                _count(result)
                if result is Read.FAILED:
                    self.switch.failed(Off.FAILING, time.monotonic())
                if result is not Read.READ:
                    break
                read += 1
        if read:
            self.switch.worked((Off.FAILING,))
        self._show()
        took_s = time.perf_counter() - began_s
        self.reads.append((read * self._pages.tokens, took_s))
        self._count_moved("read", read, took_s)
        return [n < read for n in range(len(keys))]

    def batch_set_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: StorageExtraInfo | None = None
    ) -> list[bool]:
        """Writes pages, up to the first that has no room: those after it would be of no use."""
        prefix = _prefix(extra_info)
        if not prefix or prefix[-1] != self._last_stored:  # or it was touched just now
            self._touch_prefix(prefix)
        self._last_stored = keys[-1] if keys else None
        began_s, used_ns = time.perf_counter(), _used_ns() - len(prefix)
        stored = written = 0
        may_write = self.switch.begin_write(time.monotonic())
        if not may_write:
            is_full = self.switch.why is Off.FULL
            _count(Written.REFUSED if is_full else "skipped", len(keys))
        elif not self._is_retired:
            for key, parts in zip(keys, self._pages.parts(host_indices), strict=True):
                result = self._space.put(key, parts, used_ns - stored)
                _count(result)
                if result not in (Written.WRITTEN, Written.KNOWN):
                    why = Off.FAILING if result is Written.FAILED else Off.FULL
                    self.switch.failed(why, time.monotonic())
                    break
                written += result is Written.WRITTEN
                stored += 1
        if written:
            self.switch.worked((Off.FULL, Off.FAILING))
        self.switch.end_write(time.monotonic())
        self._show()
        self._count_moved("written", written, time.perf_counter() - began_s)
        if may_write:
            self._notes.write(_used_ns())
        self._apply_leases()
        gauge("table_size").labels("shared_tier", "bytes").set(self._folder.used_bytes)
        return [n < stored for n in range(len(keys))]

    def _without_v1(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("SGLang calls this only without its interface V1")

    get = set = batch_get = batch_set = exists = _without_v1

    def _touch_prefix(self, prefix: Sequence[str]) -> None:
        """Records the use of the pages before those of a call: an engine that has them in its own
        memory never reads them here, and without them what follows is of no use."""
        used_ns = _used_ns()
        for depth, key in enumerate(prefix[:_MOST_TOUCHED]):
            self._space.touch(key, used_ns - depth)

    def _count_moved(self, operation: str, pages: int, seconds: float) -> None:
        if pages:
            counter("shared_tier_bytes").labels(operation).inc(pages * self._pages.bytes)
            counter("shared_tier_tokens").labels(operation).inc(pages * self._pages.tokens)
            counter("shared_tier_seconds").labels(operation).inc(seconds)

    def _show(self) -> None:
        """Logs that the tier was turned off or on, and shows it."""
        why = self.switch.why
        if why is self._shown:
            return
        for each in Off:
            gauge("shared_tier_off").labels(each.value).set(each is why)
        what = "is used again" if why is None else _WORDS[why]
        log.warning("sgl-ext: the shared tier in %s %s", self._space.path.parent, what)
        self._shown = why

    def retire(self) -> None:
        """Neither reads nor writes from now on."""
        self._is_retired = True

    def clear(self) -> bool:
        """Removes the pages of all engines that are like this one."""
        self._space.clear()
        self._notes.clear()
        return True

    def close(self) -> None:
        self.retire()
        for each in (self._space, self._notes, self._folder):
            each.close()


class Tiered(Protocol):
    """What is needed of a radix cache."""

    @property
    def cache_controller(self) -> CacheController | None: ...


def shared_pages_of(cache: Tiered) -> SharedPages | None:
    """The shared tier of a cache, if it has one."""
    controller = cache.cache_controller
    storage = None if controller is None else controller.storage_backend
    return storage if isinstance(storage, SharedPages) else None


def _build_hash() -> None:
    """Has SGLang compile its hash of pages now, and not while it serves. Raises SettingsError."""
    try:
        sglang_api.get_hash_str([0])
    except Exception as error:
        raise SettingsError(f"SGLang cannot name pages: {error} ({error.__cause__})") from error


def _used_ns() -> int:
    return time.time_ns() // _USED_TOGETHER_NS * _USED_TOGETHER_NS


def _prefix(extra_info: StorageExtraInfo | None) -> Sequence[str]:
    return (extra_info.prefix_keys if extra_info is not None else None) or ()


def _count(result: str, pages: int = 1) -> None:
    if pages:
        counter("shared_tier_pages").labels(str(result)).inc(pages)


def _count_evicted(pages: int, size: int) -> None:
    _count("evicted", pages)
    counter("shared_tier_bytes").labels("evicted").inc(size)
