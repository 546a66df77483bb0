"""Tokens of requests, by what was done for them."""

from typing import NamedTuple


class Tokens(NamedTuple):
    """computed: prompt tokens that an engine computed. read: those that it had in its cache.
    output: generated tokens."""

    computed: int = 0
    read: int = 0
    output: int = 0

    @property
    def prompt(self) -> int:
        """Tokens of the prompts."""
        return self.computed + self.read

    def plus(self, other: "Tokens") -> "Tokens":
        """The sums of both."""
        return Tokens(
            self.computed + other.computed, self.read + other.read, self.output + other.output
        )
