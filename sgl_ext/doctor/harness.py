"""Which harness sent a request, by its headers and its stripped header line."""

from __future__ import annotations

from collections.abc import Mapping

CLAUDE_CODE, CODEX, OPENCODE, SDK, UNKNOWN = "claude-code", "codex", "opencode", "sdk", "unknown"
HARNESSES = (CLAUDE_CODE, CODEX, OPENCODE, SDK, UNKNOWN)
# The beginnings of user agents in lower case; the first match counts.
_USER_AGENTS = (
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
# Headers that only one harness sends.
_OWN_HEADERS = (
    (b"x-claude-code-session-id", CLAUDE_CODE),
    (b"x-codex-turn-metadata", CODEX),
    (b"x-opencode-session", OPENCODE),
    (b"x-opencode-client", OPENCODE),
)


def harness_of(headers: Mapping[bytes, bytes], billing: Mapping[str, str]) -> str:
    """One of HARNESSES.

    headers: names in lower case. billing: the fields of the stripped header line.
    """
    for name, harness in _OWN_HEADERS:
        if name in headers:
            return harness
    agent = headers.get(b"user-agent", b"")[:64].lower()
    found = next((harness for start, harness in _USER_AGENTS if agent.startswith(start)), None)
    if found in (CLAUDE_CODE, CODEX, OPENCODE):
        return found
    if "cc_version" in billing:
        return CLAUDE_CODE
    if headers.get(b"originator", b"").lower().startswith(b"codex"):
        return CODEX
    if b"opencode/" in agent:
        return OPENCODE
    return found or (SDK if b"x-stainless-lang" in headers else UNKNOWN)
