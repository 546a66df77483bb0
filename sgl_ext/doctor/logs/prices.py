"""What tokens cost, in a table that the user gives.

currency = "USD"
computed = 3.00      # a million prompt tokens that an engine computed
read = 0.30          # a million prompt tokens read from its cache
output = 15.00       # a million generated tokens

[models."qwen3"]     # other prices for one model
computed = 0.50
"""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from sgl_ext.doctor.logs.tokens import Tokens

_MILLION = 1_000_000
_KINDS = ("computed", "read", "output")


class WrongPrices(Exception):
    """The table cannot be used; the message names the file, the key and the value."""


class Price(NamedTuple):
    """For a million tokens of each kind."""

    computed: float = 0.0
    read: float = 0.0
    output: float = 0.0

    def of(self, tokens: Tokens) -> float:
        """What these tokens cost."""
        parts = zip(self, (tokens.computed, tokens.read, tokens.output), strict=True)
        return sum(price * count for price, count in parts) / _MILLION


class Prices(NamedTuple):
    """by_model: the prices of models that have their own. usual: those of all others."""

    currency: str
    usual: Price
    by_model: dict[str, Price]

    def of(self, model: str, tokens: Tokens) -> float:
        """What these tokens of a model cost."""
        return self.by_model.get(model, self.usual).of(tokens)


def read_prices(path: Path) -> Prices:
    """The table in a file. Raises WrongPrices."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WrongPrices(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WrongPrices(f"{path}: {error}") from None
    currency, models = table.pop("currency", ""), table.pop("models", {})
    if not isinstance(currency, str) or len(currency) > 8:
        raise WrongPrices(f"{path}: currency={currency!r}: must be a short text")
    if not isinstance(models, dict) or not all(isinstance(m, dict) for m in models.values()):
        raise WrongPrices(f"{path}: models: must be tables, one for each model")
    usual = _price(path, "", table, Price())
    named = {n: _price(path, f"models.{n}.", table, usual) for n, table in models.items()}
    return Prices(currency, usual, named)


def _price(path: Path, prefix: str, table: dict[str, Any], usual: Price) -> Price:
    for key, value in table.items():
        if key not in _KINDS:
            known = ", ".join(_KINDS)
            raise WrongPrices(f"{path}: {prefix}{key}: is no price; there are {known}")
        if type(value) not in (int, float) or not 0 <= value < float("inf"):
            raise WrongPrices(f"{path}: {prefix}{key}={value!r}: must be a number, 0 or more")
    return usual._replace(**table)
