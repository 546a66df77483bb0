"""Writes docs/reference/settings.md from the schema: `python -m docs.settings_page`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from sgl_ext.settings.fields import TABLES, Field

PAGE = Path(__file__).with_name("reference") / "settings.md"
_HEAD = """# Settings

<!-- Made by `python -m docs.settings_page`. Do not edit this page. -->

Each line has a key, its default if it has one, and what is allowed. \
Every key is also a flag of `sgl-ext serve`: `pin-ttl-s = 60` in the file is \
`--pin-ttl-s 60`. A flag wins over the file that `--config` names. In the file a key can be \
written with hyphens or underscores. `python -m sgl_ext.balancer.serve`, for a balancer without a \
launcher, takes the flags of `[balancer]`, a `--worker URL` for each engine, and a `--config`.

What has a ↻, and all of `[tenants]` and `[hints]`, changes \
[without a restart](../guide/operations.md#reload-without-a-restart) of anything. \
A flag of a list can be repeated and adds to the list in the file; `--no-strip-headers` empties it \
first. A flag that is true or false has a `--no-...` form. Times (`-s`) are at most a year.

A time or a size is a number of seconds or bytes, or a text with a unit: `"20s"`, \
`"5min"`, `"1h"`, `"2d"`; `"64MB"`, `"1GB"`, where a KB is 1,024 bytes. \
A flag takes the same: `--drain-s 20s`.

The launcher gives each child its settings as JSON in the environment variable `SGLEXT_SETTINGS`. \
No key is in there: `api-key` names the file or the variable that holds it.
"""
_ABOUT = {
    "picker": "For `python -m sgl_ext.epp` alone, which takes the flags of `[balancer]`, too: "
    "[gateways](../guide/fleet.md#behind-envoy-and-other-gateways).",
    "tenants": "A table for each tenant: `[tenants.NAME]`, or `--tenant NAME:weight=2,...`. "
    "See [tenants](../guide/tenants.md).",
    "hints": "A table for each tenant, kind of agent, harness or model whose requests get "
    "[default hints](../guide/operations.md#default-hints): `[hints.tenant.NAME]`, "
    "`[hints.agent.NAME]`, `[hints.harness.NAME]`, `[hints.model.NAME]`. "
    "There are no flags for them.",
    "models": "A `[[models]]` for each of several models, in place of `model-path`, `instances` "
    "and `tp`, and below it `[models.engine]` with SGLang's flags for its engines: "
    "[several models](../guide/fleet.md#several-models).",
    "aliases": 'Other names of models and LoRA adapters, as `"claude-haiku-*" = "small"`: '
    "[several models](../guide/fleet.md#several-models). They change without a restart.",
    "engine": "SGLang's own flags without their dashes: true is a bare flag, false leaves it out, "
    "a list repeats values. A flag of SGLang's on the launcher's command line comes after these.",
}


def page() -> str:
    """The page as Markdown."""
    sections = [_HEAD]
    for name, fields in TABLES.items():
        about = f"\n{_ABOUT[name]}\n" if name in _ABOUT else ""
        sections.append(f"## [{name}]\n{about}" + (f"\n{_list(name, fields)}" if fields else ""))
    return "\n".join(sections)


def _list(table: str, fields: Mapping[str, Field]) -> str:
    lines = []
    for name, field in fields.items():
        reloads = table not in ("tenants", "hints") and field.reload.applies
        line = f"- `{name.replace('_', '-')}`{'↻' if reloads else ''}"
        if field.shown_default:
            line += f" = `{field.shown_default}`"
        if allowed := _short(field.allowed):
            line += f" ({allowed})"
        text = re.sub(r"\b(guide|how|reference|start)/([\w-]+)\.md", _link, field.help)
        lines.append(f"{line}: {text}")
    return "\n".join(lines) + "\n"


def _short(allowed: str) -> str:
    """A range as signs: what is said in words in errors."""
    for words, signs in _SIGNS:
        allowed = re.sub(words, signs, allowed)
    return allowed


_SIGNS = (
    (r"an? (integer|number) of at least ", r"\1 >= "),
    (r"a number above 0 and at most 31536000", "> 0"),
    (r"a number from 0 to 31536000", ">= 0"),
    (r"an? (integer|number) above (\S+) and at most (\S+)", r"> \2, <= \3"),
    (r"an? (integer|number) from (\S+) to (\S+)", r"\2 to \3"),
    (r"integer >=", ">="),
    (r"text that is not empty|true or false|^a path$", ""),
    (r"^a list, each a ", "list: "),
    (r", so that no key is on a command line", ""),
)


def _link(place: re.Match[str]) -> str:
    folder, name = place.groups()
    path = f"{name}.md" if folder == PAGE.parent.name else f"../{folder}/{name}.md"
    return f"[{name}]({path})"


if __name__ == "__main__":
    PAGE.write_text(page())
