"""Which keys are valid on all balancers: a key that was revoked on one is revoked on all.

Each balancer has the operator's key file. The newest one, by the time of its last change, is known
to all through the store: its version and the hashes of its keys. A balancer that reads an older
file says so, and accepts only the keys that both files have. So the store can take keys away and
never give one: who can write there gains nothing.
"""

import logging

from sgl_ext.balancer.access.authentication import KeyFileReloader
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.documents import StoreFailed
from sgl_ext.balancer.store.shared_state import SharedState

log = logging.getLogger(__name__)

_NAME = "keys"
_HASH_BYTES = 32


class SharedKeys:
    """Compares this balancer's key file with the newest one."""

    def __init__(self, key_file: KeyFileReloader, state: SharedState, metrics: Metrics) -> None:
        self._key_file = key_file
        self._state = state
        self._shared = -1
        self._is_older = False
        self._older = metrics.key_file_older

    async def compare(self) -> bool:
        """Whether other keys are valid now than before. Call it every second."""
        version, hashes = self._key_file.changed_ns, self._key_file.hashes
        try:
            newer = await self._state.newer(_NAME, version)
            if newer is None and version > self._shared:
                await self._state.share(_NAME, version, b"".join(map(bytes.fromhex, hashes)))
                self._shared = version
        except StoreFailed:  # what was revoked stays revoked
            return False
        valid = None if newer is None else _hashes(newer[1])
        is_older = valid is not None and valid != hashes
        if is_older and not self._is_older:
            message = "keys=%s: another balancer reads a newer file: only keys in both are valid"
            log.warning(message, self._key_file.path)
            self._older.inc()
        elif self._is_older and not is_older:
            log.info("keys=%s: as new as that of every other balancer", self._key_file.path)
        self._is_older = is_older
        return self._key_file.restrict(valid)


def _hashes(data: bytes) -> frozenset[str]:
    ends = range(0, len(data), _HASH_BYTES)
    return frozenset(data[at : at + _HASH_BYTES].hex() for at in ends)
