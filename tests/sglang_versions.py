"""What tests leave out with an older SGLang: `make test-sglang SGLANG=0.5.22`."""

from __future__ import annotations

import pytest

from sgl_ext.engine.sglang_versions import OFF, TESTED, installed


def needs_group(name: str) -> pytest.MarkDecorator:
    """A test of a group of hooks that an older version cannot have."""
    return pytest.mark.skipif(
        name in OFF.get(installed(), ()), reason=f"SGLang {installed()} cannot have: {name}"
    )


def needs_newest(why: str) -> pytest.MarkDecorator:
    """A test of what SGLang itself does in its newest version alone. why: what the older does."""
    return pytest.mark.skipif(installed() != TESTED[-1], reason=f"SGLang {installed()}: {why}")
