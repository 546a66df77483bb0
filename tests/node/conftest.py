"""Each answer of a node is what the SDKs read."""

from tests.answers import answers_are_the_sdks, looked_at_answers

__all__ = ["answers_are_the_sdks", "looked_at_answers"]
