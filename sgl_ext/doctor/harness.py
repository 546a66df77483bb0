"""Which agent sent a request, told by what it says of itself: its headers, its billing line."""

from __future__ import annotations

from collections.abc import Mapping

CLAUDE_CODE, CODEX, OPENCODE, SDK, UNKNOWN = "claude-code", "codex", "opencode", "sdk", "unknown"
HARNESSES = (CLAUDE_CODE, CODEX, OPENCODE, SDK, UNKNOWN)
# By what a user agent begins with, in lower case; the first that fits. An SDK is what is left
# of an agent that does not say more.
_AGENTS = (
    (b"claude-cli/", CLAUDE_CODE),
    (b"claude-code/", CLAUDE_CODE),
    (b"codex", CODEX),
    (b"opencode", OPENCODE),
    (b"anthropic/", SDK),
    (b"asyncanthropic/", SDK),
    (b"openai/", SDK),
    (b"asyncopenai/", SDK),
    (b"ai-sdk/", SDK),
    (b"ai/", SDK),
)
# Headers that one harness alone sends.
_SIGNS = (
    (b"x-claude-code-session-id", CLAUDE_CODE),
    (b"x-codex-turn-metadata", CODEX),
    (b"x-opencode-session", OPENCODE),
    (b"x-opencode-client", OPENCODE),
)


def harness_of(headers: Mapping[bytes, bytes], billing: Mapping[str, str]) -> str:
    """One of HARNESSES.

    headers: names in lower case. billing: the fields of the line that was stripped.
    """
    for name, harness in _SIGNS:
        if name in headers:
            return harness
    agent = headers.get(b"user-agent", b"")[:64].lower()
    found = next((harness for start, harness in _AGENTS if agent.startswith(start)), None)
    if found in (CLAUDE_CODE, CODEX, OPENCODE):
        return found
    if "cc_version" in billing:
        return CLAUDE_CODE
    if headers.get(b"originator", b"").lower().startswith(b"codex"):
        return CODEX
    if b"opencode/" in agent:
        return OPENCODE
    return found or (SDK if b"x-stainless-lang" in headers else UNKNOWN)
