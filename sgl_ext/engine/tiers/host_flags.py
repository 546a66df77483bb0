"""SGLang's flags of the host cache that cannot work, each with its value.

SGLang 0.5.23 takes some of these and fails later: when it allocates the host pool, after it has
loaded the weights, or when it makes the first copy. Others have no effect.
"""

import math
from collections.abc import Iterator

from sgl_ext.engine.sglang_types import ResolvedArgs

_LAYOUTS = {
    "direct": ("layer_first", "page_first_direct"),
    "kernel": ("layer_first", "page_first", "page_head"),
    "kernel_ascend": ("page_first_direct", "page_first_kv_split"),
}
"""What each backend copies. SGLang itself turns `page_first` into `page_first_direct` for the
direct one."""


def problems(args: ResolvedArgs) -> Iterator[str]:
    """What is wrong, one flag in a line; nothing if there is no host cache."""
    backend = args.hicache_storage_backend
    if not args.enable_hierarchical_cache:
        # A decode engine can offload to storage by itself.
        if backend is not None and args.disaggregation_mode == "null":
            need = "has no effect without --enable-hierarchical-cache; add it, or leave this out"
            yield f"--hicache-storage-backend={backend}: {need}"
        return
    size, ratio = args.hicache_size, args.hicache_ratio
    if size < 0:
        yield f"--hicache-size={size}: must be a number of GB, or 0 for --hicache-ratio to count"
    if ratio is not None and size <= 0 and not 0 < ratio < math.inf:
        what = "the host pool has so many times the tokens of the device's"
        yield f"--hicache-ratio={ratio:g}: must be above 0: {what}"
    copies, layout = args.hicache_io_backend, args.hicache_mem_layout
    if layout not in (fit := _LAYOUTS.get(copies, (layout,))):
        reason = f"--hicache-io-backend {copies} does not copy this layout; it copies"
        yield f"--hicache-mem-layout={layout}: {reason} {', '.join(fit)}"
