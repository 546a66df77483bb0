"""Which agent sent a request, by heads as the agents send them."""

from __future__ import annotations

import pytest

from sgl_ext.reading.client import harness_of


@pytest.mark.parametrize(
    ("headers", "billing", "harness"),
    [
        ({"user-agent": "claude-cli/2.1.197 (external, sdk-cli)"}, {}, "claude-code"),
        ({"x-claude-code-session-id": "1", "user-agent": "proxy"}, {}, "claude-code"),
        ({}, {"cc_version": "2.1"}, "claude-code"),
        ({"user-agent": "codex_exec/0.169.0 (Debian 12.0.0; x86_64)"}, {}, "codex"),
        ({"originator": "codex_cli_rs"}, {}, "codex"),
        ({"user-agent": "opencode/1.0.3"}, {}, "opencode"),
        ({"user-agent": "ai-sdk/provider-utils/3.0 opencode/1.0"}, {}, "opencode"),
        ({"user-agent": "QwenCode/0.24.4 (linux; x64)"}, {}, "qwen-code"),
        ({"user-agent": "Anthropic/Python 0.70.0"}, {}, "sdk"),
        ({"user-agent": "AsyncOpenAI/Python 2.1.0"}, {}, "sdk"),
        ({"x-stainless-lang": "js"}, {}, "sdk"),
        ({"user-agent": "curl/8.1"}, {}, "unknown"),
        ({}, {}, "unknown"),
    ],
)
def test_a_harness_is_recognized_by_its_headers(
    headers: dict[str, str], billing: dict[str, str], harness: str
) -> None:
    raw = {name.encode(): value.encode() for name, value in headers.items()}
    assert harness_of(raw, billing) == harness
