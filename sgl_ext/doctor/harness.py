"""Which harness sent a request, by its headers and its stripped header line."""

from collections.abc import Mapping

CLAUDE_CODE, CODEX, OPENCODE, SDK, UNKNOWN = "claude-code", "codex", "opencode", "sdk", "unknown"
HARNESSES = (CLAUDE_CODE, CODEX, OPENCODE, SDK, UNKNOWN)
# The beginnings of user agents in lower case.
_USER_AGENTS = (
    (b"claude-cli/", CLAUDE_CODE),
    (b"claude-code/", CLAUDE_CODE),
    (b"codex", CODEX),
    (b"opencode", OPENCODE),
)
_SDK_AGENTS = (b"anthropic/", b"asyncanthropic/", b"openai/", b"asyncopenai/", b"ai-sdk/", b"ai/")
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
    for start, harness in _USER_AGENTS:
        if agent.startswith(start):
            return harness
    if "cc_version" in billing:
        return CLAUDE_CODE
    if headers.get(b"originator", b"").lower().startswith(b"codex"):
        return CODEX
    if b"opencode/" in agent:
        return OPENCODE
    return SDK if agent.startswith(_SDK_AGENTS) or b"x-stainless-lang" in headers else UNKNOWN
