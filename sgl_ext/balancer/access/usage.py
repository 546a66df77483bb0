"""What keys use of each model in a month, and whether their budgets allow another request.

    requests -- count --> not sent --> a batch on its way --> the table that all balancers share
                                                                        |
    a key's use = what the table had when it was read last              |
                  + the batch that is on its way + what is not sent <---+

No request waits for the table. Each process sends what it counted once a second and reads what all
have used, so a budget is exceeded by what runs when it ends, and by what others let in within a
second. While the table fails, each process goes on by what it knows. A process that is killed loses
what it counted in its last second.
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import NamedTuple

from sgl_ext.balancer.store.documents import StoreFailed
from sgl_ext.balancer.store.shared_state import KEPT_DAYS, Batch, UsageTable, Use
from sgl_ext.key_file import ApiKey
from sgl_ext.protocols.errors import BalancerError

log = logging.getLogger(__name__)

# Of one day. Keys are the operator's, so there are more only after a long outage of the table.
_MAX_UNSENT = 10_000
_MAX_NAMES = 10_000
MOST_TENANTS = 256
OTHERS = "other tenants"
"""Stands for the tenants beyond the bound."""
_Name = tuple[str, str]  # a tenant, and the name of one of its keys
# Of one name, by model. The table has a key and a model as one name, "KEY MODEL".
_Amounts = dict[str, "Amount"]


class ModelUse(NamedTuple):
    """What a key used of a model: a `Use` of the table, whose `key` has both names."""

    period: str
    tenant: str
    key: str
    model: str
    requests: int
    tokens: int


class Amount(NamedTuple):
    """Requests and tokens."""

    requests: int = 0
    tokens: int = 0

    def plus(self, requests: int, tokens: int) -> "Amount":
        return Amount(self.requests + requests, self.tokens + tokens)


@dataclass(eq=False)
class UsageLedger:
    """What this process counted, and what it knows of others.

    table: None without a store; then only this process's own use since its start counts.
    clock: seconds since 1970.
    """

    table: UsageTable | None = None
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._writer = os.urandom(8).hex()
        self._number = 0
        self._unsent: dict[tuple[str, _Name, str], Amount] = {}  # by day, name and model
        self._batch: Batch | None = None
        # Of the current month: the table's, and what is not in it yet.
        self._month = ""
        self._known: dict[_Name, Amount] = {}
        self._own: dict[_Name, _Amounts] = {}
        # Of requests without a key, since the last `sync`, by model.
        self._tenants: dict[str, dict[str, list[int]]] = {}
        # Claimed by requests that run.
        self._claimed: dict[_Name, int] = {}

    def require_budget(self, key: ApiKey) -> None:
        """Raises BalancerError if the key's budget of this month is used up."""
        if key.requests_per_month is None and key.tokens_per_month is None:
            return
        used = self.used(key)
        tokens = used.tokens + self._claimed.get((key.tenant, key.name), 0)
        for limit, amount, unit in (
            (key.requests_per_month, used.requests, "requests"),
            (key.tokens_per_month, tokens, "tokens"),
        ):
            if limit is not None and amount >= limit:
                raise BalancerError(
                    HTTPStatus.PAYMENT_REQUIRED,
                    f"This key's budget of {limit} {unit} for {self._month} is used up. The next "
                    f"month begins at {_next_month(self._month)}.",
                    code="insufficient_quota",
                )

    def used(self, key: ApiKey) -> Amount:
        """What the key has used in this month, as far as it is known here."""
        self._turn_month()
        name = key.tenant, key.name
        used = self._known.get(name, Amount())
        for own in self._own.get(name, {}).values():
            used = used.plus(*own)
        return used

    def begin(self, key: ApiKey, tokens: int, model: str = "") -> None:
        """Counts a request, which claims these tokens until `end`."""
        name = key.tenant, key.name
        self._claimed[name] = self._claimed.get(name, 0) + tokens
        self.count(key, 1, 0, model)

    def end(self, key: ApiKey, tokens: int) -> None:
        """The request claims nothing any more: `count` has its real cost, or gets it."""
        name = key.tenant, key.name
        self._claimed[name] = self._claimed.get(name, 0) - tokens
        if self._claimed[name] <= 0:
            del self._claimed[name]

    def count(self, key: ApiKey, requests: int, tokens: int, model: str = "") -> None:
        """Adds to what the key has used."""
        self._add((key.tenant, key.name), model, requests, tokens)

    def count_tenant(self, tenant: str, tokens: int, model: str = "") -> None:
        """Adds a request without a key. Clients may name tenants, so those beyond MOST_TENANTS
        between two calls of `sync` are one."""
        models = self._tenants.get(tenant)
        if models is None:
            name = tenant if len(self._tenants) < MOST_TENANTS else OTHERS
            models = self._tenants.setdefault(name, {})
        sums = models.setdefault(model, [0, 0])
        sums[0] += 1
        sums[1] += tokens

    async def days(self, month: str) -> list[ModelUse]:
        """What keys and tenants used of each model on each day of a month; a tenant's requests
        without a key have the key "". Without a store, what this process counted of this month,
        as one row. Raises StoreFailed."""
        if self.table is not None:
            return [_split(use) for use in await self.table.days(month)]
        self._flush_tenants()
        self._turn_month()
        own = self._own.items() if month == self._month else ()
        return [
            ModelUse(month, *name, model, *amount)
            for name, amounts in own
            for model, amount in amounts.items()
        ]

    def _flush_tenants(self) -> None:
        """Bounds what it knows, too: a tenant that is new when there are many is one of others."""
        counted, self._tenants = self._tenants, {}
        for tenant, models in counted.items():
            name = tenant, ""
            is_new = name not in self._own and name not in self._known
            if is_new and len(self._own) + len(self._known) >= _MAX_NAMES:
                name = OTHERS, ""
            for model, sums in models.items():
                self._add(name, model, *sums)

    def _add(self, name: _Name, model: str, requests: int, tokens: int) -> None:
        self._turn_month()
        self._count_own(name, model, requests, tokens)
        if self.table is not None:
            at = _day(self.clock()), name, model
            if at in self._unsent or len(self._unsent) < _MAX_UNSENT:
                self._unsent[at] = self._unsent.get(at, Amount()).plus(requests, tokens)

    def _count_own(self, name: _Name, model: str, requests: int, tokens: int) -> None:
        amounts = self._own.setdefault(name, {})
        amounts[model] = amounts.get(model, Amount()).plus(requests, tokens)

    async def sync(self) -> None:
        """Sends what was counted, and reads what all have used. Call it every second, and at the
        end. A failure is counted by the store, and tried again."""
        self._flush_tenants()
        if self.table is None:
            return
        try:
            while self._batch is not None or self._unsent:
                self._batch = self._batch or self._next_batch()
                await self.table.add(self._batch)
                self._batch = None
            self._turn_month()
            month = self._month
            found = await self.table.read(month)
        except StoreFailed:
            return
        if month == self._month:
            self._known = {}
            for use in map(_split, found):
                name = use.tenant, use.key
                known = self._known.get(name, Amount())
                self._known[name] = known.plus(use.requests, use.tokens)
            # What was counted during the calls above is not in what was read.
            self._own = {}
            for (day, name, model), amount in self._unsent.items():
                if day.startswith(month):
                    self._count_own(name, model, *amount)

    def _next_batch(self) -> Batch:
        unsent, self._unsent = self._unsent, {}
        uses = [
            Use(period, tenant, f"{key} {model}" if model else key, *amount)
            for (day, (tenant, key), model), amount in unsent.items()
            for period in (day, day[:7])
        ]
        # A batch names each period of a key once.
        merged: dict[tuple[str, str, str], Use] = {}
        for use in uses:
            before = merged.get(use[:3])
            merged[use[:3]] = use if before is None else _sum(before, use)
        self._number += 1
        first = datetime.fromtimestamp(self.clock(), UTC) - timedelta(days=KEPT_DAYS)
        return Batch(self._writer, self._number, [*merged.values()], f"{first:%Y-%m}")

    def _turn_month(self) -> None:
        month = _day(self.clock())[:7]
        if month != self._month:
            self._month, self._known, self._own = month, {}, {}


def _split(use: Use) -> ModelUse:
    key, _, model = use.key.partition(" ")
    return ModelUse(use.period, use.tenant, key, model, use.requests, use.tokens)


def _sum(one: Use, other: Use) -> Use:
    return one._replace(requests=one.requests + other.requests, tokens=one.tokens + other.tokens)


def _day(now_s: float) -> str:
    return datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%d")


def _next_month(month: str) -> str:
    year, number = map(int, month.split("-"))
    following = datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC)
    return following.isoformat().replace("+00:00", "Z")
