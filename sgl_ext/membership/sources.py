"""Opens the sources of workers that an operator names: `file:PATH` and others.

To add a kind of source, add a line to `_KINDS`: the module and the class that is called with the
name as the operator wrote it and what stands after the colon. It raises MembershipError for what
can be known to be wrong at once. A module that needs an extra is imported only when it is named.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import NamedTuple, cast

from sgl_ext.membership.member import Membership, MembershipError
from sgl_ext.membership.static import StaticList
from sgl_ext.settings.schema import BalancerSettings, SettingsError


class _Kind(NamedTuple):
    """extra: what has to be installed for it besides."""

    form: str
    module: str
    class_name: str
    extra: str = ""


_KINDS: Mapping[str, _Kind] = {
    "file": _Kind("PATH", "sgl_ext.membership.file", "WatchedFile"),
    "kubernetes": _Kind(
        "[NAMESPACE/]SERVICE", "sgl_ext.membership.kubernetes", "KubernetesSlices", "kubernetes"
    ),
    "ray": _Kind("ADDRESS/FLEET", "sgl_ext.membership.ray", "RayFleet", extra="ray"),
}
FORMS = tuple(f"{scheme}:{kind.form}" for scheme, kind in _KINDS.items())


def open_sources(settings: BalancerSettings) -> list[Membership]:
    """All sources of a balancer, in the order in which they count. Raises SettingsError."""
    found: list[Membership] = [StaticList(settings.workers)] if settings.workers else []
    for text in settings.workers_from:
        try:
            found.append(open_source(text))
        except MembershipError as error:
            raise SettingsError(f"workers_from={text!r}: {error}") from None
    return found


def open_source(text: str) -> Membership:
    """The source that `text` names, KIND:WHAT. Raises MembershipError."""
    scheme, _, rest = text.partition(":")
    kind = _KINDS.get(scheme)
    if kind is None or not rest:
        raise MembershipError(f"must be {' or '.join(FORMS)}")
    try:
        made = getattr(import_module(kind.module), kind.class_name)(text, rest)
    except ModuleNotFoundError as missing:
        if not kind.extra or (missing.name or "").startswith("sgl_ext"):
            raise
        install = f"pip install 'sgl-ext[{kind.extra}]'"
        raise MembershipError(f"{missing.name} is not installed: {install}") from None
    return cast(Membership, made)
