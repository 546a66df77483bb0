"""SGLang's unified radix cache, which measures what loads from the host take."""

import time

from sgl_ext.engine import sglang_api
from sgl_ext.engine.sglang_types import CacheInitParams
from sgl_ext.engine.tiers.loads import Loads


class LoadingCache(sglang_api.UnifiedRadixCache):
    """loads: what was measured."""

    def __init__(self, params: CacheInitParams) -> None:
        self.loads = Loads()
        super().__init__(params)

    def ready_to_load_host_cache(self) -> int:
        started_s = time.monotonic()
        load = super().ready_to_load_host_cache()
        if load >= 0:
            self.loads.started(time.monotonic() - started_s)
        return load

    def loading_check(self, finish_count: int | None = None) -> None:
        if self.cache_controller is None:
            return
        under_way = [*self.cache_controller.ack_load_queue]
        super().loading_check(finish_count)
        done = len(under_way) - len(self.cache_controller.ack_load_queue)
        self.loads.finished(under_way[:done])
