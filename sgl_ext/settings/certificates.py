"""The certificate and the private key of a port that speaks TLS: loaded, checked, and read again.

A pair that cannot be used is refused with the name of the file and the reason. After the start such
a change leaves the earlier pair in use.
"""

import logging
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sgl_ext.settings.schema import BalancerSettings, SettingsError
from sgl_ext.settings.secrets import file_version

log = logging.getLogger(__name__)

# OpenSSL's flag, which the module has no name for.
_NO_CHECK_TIME = 0x200000
_MISMATCH = "KEY_VALUES_MISMATCH"


class Certificate:
    """A pair of files, as `tls-cert` and `tls-key` name them.

    context: for new connections. Those that exist keep the one that they began with.
    expires_s: when the certificate ends, in seconds since 1970; 0 if it does not say.
    """

    def __init__(self, cert: str, key: str, failed: Callable[[], None] = lambda: None) -> None:
        """failed: called when a changed pair cannot be used. Raises SettingsError."""
        self._cert, self._key = Path(cert), Path(key)
        self._failed = failed
        self._version = self._version_now()
        self._load()

    def reload(self, *, always: bool = False) -> bool:
        """Reads the files again if one has changed, or `always`. Whether there is a new context."""
        version = self._version_now()
        if version == self._version and not always:
            return False
        self._version = version
        try:
            self._load()
        except SettingsError as error:
            log.error("%s; the earlier certificate stays in use", error)
            self._failed()
            return False
        log.info("tls_cert=%s: read again", self._cert)
        return True

    def _load(self) -> None:
        context = _server_context(self._cert, self._key)
        self.expires_s = _expiry_s(context, self._cert)
        if self.expires_s < time.time():
            log.warning("tls_cert=%s: the certificate has expired", self._cert)
        self.context = context

    def _version_now(self) -> tuple[object, object]:
        return file_version(self._cert), file_version(self._key)


def certificate_of(
    settings: BalancerSettings, failed: Callable[[], None] = lambda: None
) -> Certificate | None:
    """The pair of a balancer's settings; None without TLS. As the constructor."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Certificate(settings.tls_cert, settings.tls_key, failed)


def _server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """Raises SettingsError, which names the file that is wrong."""
    for name, path in (("tls_cert", cert), ("tls_key", key)):
        try:
            text = path.read_bytes()
        except OSError as error:
            raise SettingsError(f"{name}={str(path)!r}: {error.strerror}") from None
        what = b"CERTIFICATE" if path is cert else b"PRIVATE KEY"
        if b"-----BEGIN " not in text or what not in text:
            wanted = "a certificate" if path is cert else "a private key"
            raise SettingsError(f"{name}={str(path)!r}: has not {wanted} in PEM")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        ssl.create_default_context().load_verify_locations(cert)
    except ssl.SSLError as error:
        raise SettingsError(f"tls_cert={str(cert)!r}: {_reason(error)}") from None
    try:
        context.load_cert_chain(cert, key, password=_refuse_password)
    except _Encrypted:
        raise SettingsError(
            f"tls_key={str(key)!r}: is encrypted; a node starts without a person who could type "
            "the passphrase, so store it without one, readable by the node's user alone"
        ) from None
    except ssl.SSLError as error:
        is_other = error.reason == _MISMATCH
        reason = f"does not belong to {cert}" if is_other else _reason(error)
        raise SettingsError(f"tls_key={str(key)!r}: {reason}") from None
    return context


class _Encrypted(Exception):
    pass


def _refuse_password() -> str:
    raise _Encrypted


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "cannot be read").lower().replace("_", " ")


def _expiry_s(server: ssl.SSLContext, cert: Path) -> float:
    """When a certificate ends, by a handshake in memory: the `ssl` module reads no files' dates."""
    client = ssl.create_default_context(cafile=str(cert))
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(there, back, server_side=True)
    theirs = client.wrap_bio(back, there)
    for _ in range(2):
        for side in (theirs, ours):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:  # such as a certificate that is for no server
                return 0.0
    with suppress(ValueError):
        return ssl.cert_time_to_seconds(str((theirs.getpeercert() or {}).get("notAfter")))
    return 0.0
