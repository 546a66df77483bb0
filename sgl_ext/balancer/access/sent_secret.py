"""The secret by which engines know their balancer, as it is sent with every request to them."""

import logging

import aiohttp

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.settings.schema import SettingsError
from sgl_ext.settings.secrets import EngineSecret
from sgl_ext.wire.headers import SECRET_HEADER, header_line

log = logging.getLogger(__name__)


class SentSecret:
    """The current secret. An invalid change of its file leaves the earlier one in force.

    line: the header line for the data path; empty without a secret.
    """

    def __init__(self, source: str | None, metrics: Metrics) -> None:
        """source: the setting `engine-secret`. Raises SettingsError."""
        self._secret = EngineSecret(source)
        self._reloads = metrics.engine_secret_reloads
        self._failures = metrics.engine_secret_reload_failures

    @property
    def line(self) -> bytes:
        if not self._secret.accepted:
            return b""
        return header_line(SECRET_HEADER, self._secret.sent.encode())

    def put_into(self, session: aiohttp.ClientSession) -> None:
        """Lets a session, which may be for engines only, send the secret from now on. Without one
        it says so, and an engine that has one refuses its probes."""
        session.headers[SECRET_HEADER] = self._secret.sent

    def reload_if_changed(self) -> bool:
        """Whether the secret has changed. Call this periodically."""
        try:
            changed = self._secret.reload_if_changed()
        except SettingsError as error:
            log.error("%s; the earlier secret stays valid", error)
            self._failures.inc()
            return False
        if changed:
            log.info("engine_secret: read again")
            self._reloads.inc()
        return changed
