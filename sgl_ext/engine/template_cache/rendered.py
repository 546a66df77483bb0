"""Prompts in the HTTP process: of a chat template, only what is new is rendered.

`sgl_ext.engine.template_cache.parts` says which loops write the same for the same message and
values around it. Such a loop is changed to look up what it wrote for them before. It is proven on
the loaded template before the server takes requests, and checked on a rendering now and then beside
serving. Where it does not hold, or raises anything, the template is rendered as it is."""

from __future__ import annotations

import copy
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import Undefined

from radix.byte_lru import Parts
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.host_cache.token_cache import asking_group
from sgl_ext.engine.template_cache.parts import loops_of
from sgl_ext.engine.template_cache.rendering import Rendering, Site, filters_of
from sgl_ext.engine.template_cache.rewrite import PREFIX, STATE, rewrite
from sgl_ext.engine.template_cache.rules import Unclear, facts_of
from sgl_ext.engine.template_cache.run_rules import needs_of
from sgl_ext.engine.template_cache.runs import Part, Runs
from sgl_ext.engine.template_cache.samples import samples
from sgl_ext.engine.template_cache.search import searches_of

CHECK_EVERY_S = 60.0
_MOST_FAILED = 8
_logger = logging.getLogger(__name__)
_numbers = itertools.count()


class Rendered:
    """Renders as a compiled template does, for as long as that is right. Several threads may ask.

    group: of whom a rendering is; what is known of one group is not of another.
    Raises Unclear where no loop of the template can be changed.
    """

    def __init__(
        self,
        template: Any,
        source: str,
        parts: Parts[Part],
        runs: Runs,
        group: Callable[[], str | None],
    ) -> None:
        environment = template.environment
        odd = environment.autoescape or environment.is_async
        if odd or environment.undefined is not Undefined or PREFIX in source:
            raise Unclear("environment")
        tree = environment.parse(source)
        self.loops, self.unclear = loops_of(tree, environment.globals)
        if not self.loops:
            raise self.unclear[0] if self.unclear else Unclear("no loops")
        needs = [needs_of(loop) for loop in self.loops]
        searches = searches_of(tree, facts_of(tree, environment.globals))
        names = rewrite(tree, self.loops, needs, searches)
        environment.filters.update(filters_of(environment, names))
        self._changed = environment.from_string(tree)
        self._plain = template.render
        self._parts = parts
        self._runs = runs
        self._group = group
        each = zip(self.loops, needs, strict=True)
        self._sites = [Site(next(_numbers), loop, needed) for loop, needed in each]
        self._checked_s = time.monotonic()
        self._failed = 0
        self.is_off = False

    def render(self, *args: Any, **named: Any) -> str:
        """As `Template.render`: its text, or what it raises."""
        asked = dict(*args, **named)
        text = None if self.is_off else self.known(asked)
        if text is None:
            text = self._plain(asked)
            if not self.is_off:
                self._fails()
        elif time.monotonic() - self._checked_s >= CHECK_EVERY_S:
            self._checked_s = time.monotonic()
            beside = (copy.deepcopy(asked), text)
            threading.Thread(target=self.check, args=beside, daemon=True).start()
        return text

    def known(self, asked: Mapping[str, Any]) -> str | None:
        """The text, made of parts. None: that raised something."""
        group = self._group()
        space = "" if group is None else f"g{group}"
        rendering = Rendering(self._sites, self._parts, self._runs, space)
        try:
            if any(map(callable, asked.values())):
                return None
            text: str = self._changed.render({**asked, STATE: rendering})
        except Exception:
            return None
        rendering.remember()
        counter("template_parts").labels("known").inc(rendering.known)
        counter("template_parts").labels("new").inc(rendering.new)
        return text

    def prove(self, conversations: Iterable[Mapping[str, Any]]) -> None:
        """Turns it off if it is not right for one of these. Twice: with new parts, and known."""
        both = [(asked, self._outcome(asked)) for asked in conversations]
        for asked, right in both * 2:
            text = self.known(asked)
            if text is not None and text != right:
                self.turn_off("inexact")
                break
        self._parts.clear()
        self._runs.clear()

    def check(self, asked: Mapping[str, Any], text: str) -> None:
        """Compares with what the template itself makes of it."""
        counter("template_checks").inc()
        if self._outcome(asked) != text:
            self.turn_off("differs")

    def turn_off(self, why: str) -> None:
        """Templates are rendered whole from now on."""
        self.is_off = True
        self._parts.clear()
        self._runs.clear()
        _tell_off(why, why)

    def _fails(self) -> None:
        """What the template itself can do was not possible."""
        self._failed += 1
        if self._failed >= _MOST_FAILED:
            self.turn_off("failed")

    def _outcome(self, asked: Mapping[str, Any]) -> str | None:
        try:
            text: str = self._plain(asked)
        except Exception:
            return None
        return text


def start(tokenizer: Any, limit_bytes: int) -> None:
    """Makes the tokenizer's chat templates render only what is new; 0 bytes: none of them."""
    from transformers.utils import chat_template_utils

    sources = getattr(tokenizer, "chat_template", None)
    if not limit_bytes or not sources:
        return
    parts, runs = Parts[Part](limit_bytes // 2), Runs(limit_bytes // 2)
    for source in sources.values() if isinstance(sources, dict) else [sources]:
        template = chat_template_utils._compile_jinja_template(source)
        try:
            rendered = Rendered(template, source, parts, runs, asking_group)
            rendered.prove(samples())
        except Exception as error:
            told = str(error) if isinstance(error, Unclear) else type(error).__name__
            _tell_off("unclear", told)
            continue
        if rendered.is_off:
            continue
        if rendered.unclear:
            told = ", ".join(map(str, rendered.unclear))
            _logger.info("sgl-ext: some loops of a chat template are rendered whole (%s)", told)
        template.render = rendered.render


def _tell_off(why: str, told: str) -> None:
    counter("template_off").labels(why).inc()
    _logger.warning("sgl-ext: chat templates are rendered whole (%s)", told)
