"""Checks of the node's engines that need no engine: flags, ports, model, disks, memory, GPUs."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path

from sgl_ext.engine.tiers.page_folder import FolderError, PageFolder
from sgl_ext.node.children import request_log_of, store_of
from sgl_ext.node.flags import check_addresses, check_flags, values_of
from sgl_ext.node.hardware import (
    CPU_PLATFORM,
    Hardware,
    divide,
    find_hardware,
    gpus_of_engine,
)
from sgl_ext.process import make_folder, remove_stale
from sgl_ext.settings.fields import launch_flags
from sgl_ext.settings.schema import (
    IN_MEMORY,
    LEAST_TIER_BYTES,
    OFF,
    LaunchSettings,
    SettingsError,
    Unavailable,
)
from sgl_ext.settings.shared_tier import FOLDER_VARIABLE, OWN_FLAGS
from sgl_ext.sizing.model import SizingError, model_folder, read_config, weight_bytes


def check_start(settings: LaunchSettings) -> tuple[Hardware | None, list[str]]:
    """The devices for the engines, None if they run on other machines, and what the operator should
    know. What takes seconds comes last.

    Raises SettingsError for what would end the start, Unavailable if a later one may succeed.
    """
    parts, notes = settings.of_models, [check_disks(settings)]
    for one in parts:
        with _of_model(one):
            check_addresses(one)
            notes.append(check_shared_tier(one))
    found = None
    if settings.ray_address is None:
        for one in parts:
            with _of_model(one):
                notes.append(check_model(one))
        found = find_hardware(settings)
        free = free_memory()
        for one, devices in divide(settings, found):
            with _of_model(one):
                needed = check_memory(one, devices, free)
                free = None if free is None else free - needed
                check_gpus(one, devices)
                notes.append(check_host_pools(one, devices))
        notes.insert(0, found.reason)
    return found, [note for note in notes if note]


@contextmanager
def _of_model(settings: LaunchSettings) -> Iterator[None]:
    """Has an error name the model of these settings, if there are others."""
    try:
        yield
    except SettingsError as error:
        if not settings.served_name:
            raise
        raise type(error)(f"[[models]] {settings.served_name}: {error}") from None


def check_restart(settings: LaunchSettings) -> None:
    """Raises SettingsError if an engine with these settings would not start in place of one."""
    check_flags(settings.engine_args, launch_flags())
    check_model(settings)


_INDEX = "model.safetensors.index.json"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_CONFIGS = ("config.json", "params.json", "model_index.json")
_JSON = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    _INDEX,
)
_TOKENIZER = re.compile(r"token|vocab|tekken|merges\.txt|\.tiktoken$|\.model$", re.IGNORECASE)
_OWN_TOKENIZER = ("--tokenizer-path", "--skip-tokenizer-init")
# With these, attention is not divided by `tp` alone.
_OWN_DIVISION = ("--enable-dp-attention", "--attn-dp-size", "--attn-cp-size", "--dcp-size")


def check_model(settings: LaunchSettings) -> str:
    """What the start will do that a path does not say; "" if nothing. Raises SettingsError."""
    path, note = settings.model_path, ""
    here = Path(path)
    if "://" in path or here.is_file():
        return ""
    if here.is_dir():
        _check_folder(here, path)
        _check_tokenizer(here, path, settings.engine_args)
    else:
        note = _check_name(path, here)
    _check_division(settings)
    return note


def _check_folder(folder: Path, path: str) -> None:
    if not any((folder / name).is_file() for name in _CONFIGS) and not [*folder.glob("*.gguf")]:
        raise _model_error(path, "the folder has no config.json, so there is no model in it")
    for name in _JSON:
        with suppress(FileNotFoundError):
            _check_json(folder / name, path)
    try:
        listed = json.loads((folder / _INDEX).read_text())["weight_map"].values()
    except (OSError, ValueError, LookupError, AttributeError):
        return
    missing = sorted({name for name in listed if not (folder / name).exists()})
    if missing:
        total = len({*listed})
        raise _model_error(
            path, f"{len(missing)} of {total} weight files are missing, as {missing[0]}"
        )


def _check_json(file: Path, path: str) -> None:
    try:
        json.loads(file.read_bytes())
    except ValueError as error:
        why = f"{file.name} is not valid JSON, as if it was cut off or edited: {error}"
        raise _model_error(path, why) from None


def _check_tokenizer(folder: Path, path: str, flags: Sequence[str]) -> None:
    """Without one, an engine starts with an empty vocabulary, and answers nonsense."""
    has_own = any(flag.partition("=")[0] in _OWN_TOKENIZER for flag in flags)
    if has_own or not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        return
    if not any(_TOKENIZER.search(file.name) for file in folder.iterdir()):
        raise _model_error(path, "the folder has no tokenizer; copy it, or set tokenizer-path")


def _check_name(path: str, here: Path) -> str:
    """For what is no local file: what the engines will do with it."""
    siblings = [one.name for one in here.parent.iterdir()] if here.parent.is_dir() else []
    near = get_close_matches(here.name, siblings, 1) if here.parent != Path() else []
    hint = f"; did you mean {here.parent / near[0]}?" if near else ""
    if path[0] == "~" and (home := here.expanduser()).exists():
        hint = f"; did you mean {home}?"  # nothing expands it in a file
    if near or path[0] in "./~" or not _HUB_NAME.fullmatch(path) or path.endswith(".gguf"):
        raise _model_error(path, f"does not exist{hint}")
    if _cached(path) is not None:
        return ""
    if any(os.environ.get(name, "0") not in ("0", "") for name in _OFFLINE):
        raise _model_error(
            path, "no such folder, not in Hugging Face's cache, and HF_HUB_OFFLINE is set"
        )
    what = "is no folder here, so the engines download it from Hugging Face"
    return f"model_path={path!r}: {what}, which can take long; Ctrl-C ends it"


_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def local_folder(path: str) -> Path | None:
    """The folder with the model's files, if they are on this machine."""
    here = Path(path)
    return here if here.is_dir() else _cached(path)


def _cached(path: str) -> Path | None:
    try:
        return model_folder(path)
    except SizingError:
        return None


def _check_division(settings: LaunchSettings) -> None:
    folder = local_folder(settings.model_path)
    if settings.tp == 1 or folder is None or is_given(settings.engine_args, _OWN_DIVISION):
        return
    try:
        config = read_config(folder)
    except SizingError:
        return
    text = config.get("text_config")
    heads = (text if isinstance(text, dict) else config).get("num_attention_heads")
    if isinstance(heads, int) and heads % settings.tp:
        can = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        reason = f"the model has {heads} attention heads, so tp must be one of {', '.join(can)}"
        raise SettingsError(f"tp={settings.tp}: {reason}")


def is_given(argv: Sequence[str], flags: Sequence[str]) -> bool:
    """Whether a command line has one of these flags."""
    return bool({word.partition("=")[0] for word in argv} & {*flags})


def _model_error(path: str, reason: str) -> SettingsError:
    return SettingsError(f"model_path={path!r}: {reason}")


_MIB, _GIB, _GB = 1 << 20, 1 << 30, 10**9
# What the processes of one engine take besides weights and KV cache, at least.
ENGINE_BYTES = 3 * _GIB // 2
LEAST_DISK_BYTES = 32 * _MIB
# With these, the weights that an engine holds are not those of the files.
_OTHER_WEIGHTS = (
    *("--quantization", "--load-format", "--cpu-offload-gb", "--pp-size", "--dtype"),
    *("--pipeline-parallel-size", "--json-model-override-args", "--offload-group-size"),
)
# What SGLang leaves free when it allocates a host pool; the CPU platform leaves less.
_RESERVE_BYTES, _CPU_RESERVE_BYTES = 10 * _GIB, _GIB
# With these, an engine counts GPUs that it does not use.
_FIRST_GPU = ("--base-gpu-id", "--gpu-id-step")
_NVIDIA_SMI_S = 2.0


def check_disks(settings: LaunchSettings) -> str:
    """A warning if the disks have less room than logs and store may take; "" otherwise.

    Raises SettingsError if they have next to none.
    """
    balancer, children = settings.balancer, settings.instances + 2
    wanted = [("log_dir", settings.log_dir, settings.log_limit_bytes * children)]
    if (request_log := request_log_of(settings)) != OFF:
        is_beside_logs = Path(request_log).parent == Path(settings.log_dir)
        named = ("log_dir", settings.log_dir) if is_beside_logs else ("request_log", request_log)
        wanted.append((*named, balancer.request_log_limit_bytes))
    store = store_of(settings)
    if balancer.store_limit_bytes and store != IN_MEMORY and ":" not in store:
        is_beside_logs = Path(store).parent == Path(settings.log_dir)
        named = ("log_dir", settings.log_dir) if is_beside_logs else ("store", store)
        wanted.append((*named, balancer.store_limit_bytes))
    by_disk: dict[int, tuple[str, str, int]] = {}
    for name, path, size in wanted:
        there = _existing(Path(path))
        first = by_disk.setdefault(there.stat().st_dev, (name, path, 0))
        by_disk[there.stat().st_dev] = (*first[:2], first[2] + size)
    for name, path, size in by_disk.values():
        free = shutil.disk_usage(_existing(Path(path))).free
        if free < LEAST_DISK_BYTES:
            least = f"logs and the store need {shown(LEAST_DISK_BYTES)} at least"
            raise Unavailable(f"{name}={path!r}: its disk has {shown(free)} free; {least}")
        if free < size:
            most = f"logs and the store may grow to {shown(size)} (docs/reference/limits.md)"
            return f"{name}={path!r}: its disk has {shown(free)} free, and {most}"
    return ""


def check_memory(settings: LaunchSettings, found: Hardware, free: int | None = None) -> int:
    """The memory that the engines' processes take, and on the CPU their weights. Raises
    SettingsError if the machine's does not hold them."""
    free = free_memory() if free is None else free
    if free is None:
        return 0
    weights = 0
    if found.platform == CPU_PLATFORM:
        weights = _weights(settings) or 0
        if weights and _is_half(settings):
            weights *= 2  # the CPU platform computes with float32
    each = ENGINE_BYTES + weights
    if settings.instances * each > free:
        of = f"{shown(weights)} of weights and " if weights else ""
        reason = f"an engine needs about {shown(each)} of memory ({of}its processes)"
        have = f"{shown(free)} are free, enough for {free // each}"
        raise Unavailable(f"instances={settings.instances}: {reason}; {have}")
    rest = free - settings.instances * each
    if settings.shared_tier_bytes > rest:
        engines = f"{shown(settings.instances * each)} for the engines' processes"
        have = f"{shown(free)} of memory are free, less {engines}"
        raise Unavailable(f"shared_tier_bytes={settings.shared_tier_bytes}: {have}")
    return settings.instances * each


def check_gpus(settings: LaunchSettings, found: Hardware) -> None:
    """Raises SettingsError if there is no such GPU, or none with room for its part of the
    weights."""
    names = found.gpus[: settings.instances * gpus_of_engine(settings).gpus]
    free = free_gpu_memory() if names else {}
    for name in names:
        if free and name.isdecimal() and name not in free:
            there = ", ".join(index for index in free if index.isdecimal())
            raise Unavailable(f"{found.variable}: there is no GPU {name}, only {there}")
    weights = _weights(settings) if names else None
    part = 0 if weights is None else weights // settings.tp
    for name in names:
        if weights and part > free.get(name, part):
            need = f"needs {shown(part)} for its part of the weights ({shown(weights)}, "
            need += f"tp={settings.tp}), and {shown(free[name])} are free"
            raise Unavailable(f"model_path={settings.model_path!r}: GPU {name} {need}")


def check_host_pools(settings: LaunchSettings, found: Hardware, free: int | None = None) -> str:
    """A warning if each engine would size its host pool of HiCache by memory that the others take
    as well; "" otherwise.

    Raises SettingsError if memory does not hold the pools of this size. SGLang looks at one pool,
    after it has loaded the weights.
    """
    flags = values_of(settings.engine_args)
    if not flags.get("--enable-hierarchical-cache") or is_given(settings.engine_args, _FIRST_GPU):
        return ""
    size = flags.get("--hicache-size", 0)
    if size <= 0:
        is_divided = flags.keys() & {"--hicache-ratio", "--hicache-host-memory-fraction"}
        if settings.instances == 1 or is_divided:
            return ""
        reason = "each sizes its host pool by all memory that is free when it starts"
        return f"instances={settings.instances}: {reason}; set --hicache-size (docs/guide/pins.md)"
    free = free_memory() if free is None else free
    if free is None:
        return ""
    reserve = _CPU_RESERVE_BYTES if found.platform == CPU_PLATFORM else _RESERVE_BYTES
    pools, tier = settings.instances * gpus_of_engine(settings).gpus, settings.shared_tier_bytes
    if pools * size * _GB > free - reserve - tier:
        most = max(0, free - reserve - tier) // (pools * _GB)
        need = f"{pools} host pools need {shown(pools * size * _GB)} of memory"
        have = f"{shown(free)} are free, of which SGLang leaves {shown(reserve)}"
        have += f" and the engines share {shown(tier)}" if tier else ""
        raise Unavailable(f"--hicache-size={size}: {need}; {have}: at most {most}")
    return ""


def _weights(settings: LaunchSettings) -> int | None:
    """The bytes of the weights that an engine loads, as far as the model's files say."""
    folder = local_folder(settings.model_path)
    if folder is None or is_given(settings.engine_args, _OTHER_WEIGHTS):
        return None
    try:
        return weight_bytes(folder)
    except SizingError:
        return None


def _is_half(settings: LaunchSettings) -> bool:
    folder = local_folder(settings.model_path)
    with suppress(SizingError):
        config = {} if folder is None else read_config(folder)
        return "16" in str(config.get("dtype") or config.get("torch_dtype"))
    return False


def free_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The memory that new processes can take: the machine's, within a container's limit."""
    found = []
    with suppress(OSError, AttributeError):
        line = re.search(r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
        found.append(int(line[1]) << 10)  # type: ignore[index]
    with suppress(OSError, ValueError):  # "max" is no number
        limit = int((cgroup / "memory.max").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        # Files in the page cache give way.
        files = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        found.append(limit - int((cgroup / "memory.current").read_text()) + files)
    return min(found, default=None)


def free_gpu_memory() -> Mapping[str, int]:
    """The free bytes of each GPU, by its index and its UUID; nothing if that takes too long."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(
            command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return parsed_gpu_memory(listed.stdout.splitlines())


def parsed_gpu_memory(lines: Sequence[str]) -> dict[str, int]:
    """The free bytes of each GPU from lines of nvidia-smi: `INDEX, UUID, MIB`."""
    free = {}
    for line in lines:
        words = [word.strip() for word in line.split(",")]
        if len(words) == 3 and words[2].isdecimal():
            free[words[0]] = free[words[1]] = int(words[2]) * _MIB
    return free


def _existing(path: Path) -> Path:
    """The path, or the nearest of its parents that exists."""
    path = path.absolute()
    return next((one for one in (path, *path.parents) if one.exists()), Path("/"))


def shown(size: int) -> str:
    """A number of bytes for people."""
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB")):
        if size >= unit:
            return (
                f"{size / unit:.3g} {name}" if size < 1000 * unit else f"{size / unit:.0f} {name}"
            )
    return f"{size >> 10} KiB"


SHARED_MEMORY = Path("/dev/shm")
_TIER_FOLDERS = "sgl-ext-tier-"
_HOST_FLAG = "--enable-hierarchical-cache"
_LEAST_PAGE_TOKENS = 16


def check_shared_tier(settings: LaunchSettings, parent: Path = SHARED_MEMORY) -> str:
    """A warning if the engines' tier would not pay; "" otherwise.

    Raises SettingsError if they cannot share one, Unavailable if shared memory or the disk has no
    room.
    """
    size, disk = settings.tier_bytes, settings.disk_tier
    if (disk is None) != (settings.disk_tier_bytes == 0):
        missing = "disk_tier" if disk is None else "disk_tier_bytes"
        given = f"disk_tier_bytes={size}" if disk is None else f"disk_tier={disk!r}"
        raise SettingsError(f"{given}: give {missing}, too")
    if not size:
        return ""
    name = "shared_tier_bytes" if disk is None else "disk_tier_bytes"
    if disk is not None and settings.shared_tier_bytes:
        reason = "memory that is free keeps what of disk_tier is read; leave shared_tier_bytes out"
        raise SettingsError(f"disk_tier={disk!r}: {reason}")
    if disk is None:
        remove_stale(_TIER_FOLDERS, parent)  # a launcher that was killed left it; it takes memory
    used = 0 if disk is None else _used_bytes(Path(disk))
    for problem in _tier_problems(settings):
        raise SettingsError(f"{name}={size}: {problem}")
    parent = parent if disk is None else Path(disk)
    try:
        found = os.statvfs(parent)
    except OSError as error:
        raise Unavailable(f"{name}={size}: {parent}: {error.strerror}") from None
    free = found.f_bavail * found.f_frsize + used
    if size > free:
        more = "" if disk else "; a container gets more by --shm-size"
        raise Unavailable(f"{name}={size}: {parent} has {shown(free)} free{more}")
    page = values_of(settings.engine_args).get("--page-size")
    if page is not None and page >= _LEAST_PAGE_TOKENS:
        return ""
    given = "without --page-size most models have 1" if page is None else f"--page-size is {page}"
    why = "a page is a file, and the tier is slow with pages of so few tokens"
    return f"{name}={size}: {given}: {why}; set --page-size 64 (docs/guide/pins.md)"


def _used_bytes(disk_tier: Path) -> int:
    """What pages take there. Makes the folder if it is missing. Raises SettingsError if pages
    cannot be kept there."""
    try:
        pages = PageFolder(disk_tier, 0)
        used = pages.used_bytes
        pages.close()
    except (FolderError, OSError) as error:
        raise SettingsError(f"disk_tier: {error}") from None
    return used


def _tier_problems(settings: LaunchSettings) -> Iterator[str]:
    if settings.tier_bytes < LEAST_TIER_BYTES:
        yield f"must be 0, or at least {LEAST_TIER_BYTES}"
    if settings.ray_address is not None:
        yield "engines on Ray are on other machines; it is for those of one"
    if settings.engine.shared_prefixes:
        yield "SGLang's hashes take none of the tokens that mark a group after shared_prefixes"
    flags = values_of(settings.engine_args)
    if _HOST_FLAG not in flags:
        yield f"engines read it into their host pools; add {_HOST_FLAG}"
    for flag in (*OWN_FLAGS, "--radix-cache-backend", "--hicache-host-memory-mode"):
        if flag in flags:
            yield f"it does not work with {flag}={flags[flag]}; leave one out"


def open_shared_tier(settings: LaunchSettings, parent: Path = SHARED_MEMORY) -> None:
    """Makes the folder, which the processes that start from now on find by the environment."""
    if settings.disk_tier is not None:
        os.environ[FOLDER_VARIABLE] = str(Path(settings.disk_tier).absolute())
    elif settings.shared_tier_bytes:
        os.environ[FOLDER_VARIABLE] = str(make_folder(_TIER_FOLDERS, parent))
