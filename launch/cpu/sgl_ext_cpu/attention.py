"""Attention of new queries over a paged cache, in plain torch.

A sequence of `S` tokens ends in `E` new ones. The cache already holds their keys and values, at
the slots that the sequence's `Slots` lists in order of position. New query `i` is at position
`S - E + i` and sees every position up to its own:

        prefix            new
    +-------------+-------------+
    | all visible | lower left  |    E rows, S columns
    +-------------+-------------+

Both parts are computed separately and joined by their log-sum-exp. This needs no mask and no
query for a cached token, and it reads the prefix in place: the allocator assigns neighbouring
slots, so a prefix is a few long runs, and a run is a view. Only tokens outside long runs are
gathered. Memory apart from the cache is proportional to `E`, never to `E * S`.

Query heads that share a key head are computed as additional rows of that head, so each key is
read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Returns the log-sum-exp, which the public function does not.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

VIEW_AT_LEAST = 512
"""A run of this many neighbouring slots is read in place; shorter ones are gathered."""

QUERY_BLOCK = 1024
"""Queries computed at a time under a sliding window, which bounds its mask."""

Segment: TypeAlias = slice | Tensor
"""Cache rows: neighbouring ones as a slice, others as an index."""

Part: TypeAlias = tuple[Tensor, Tensor]
"""Output `[key heads, group, E, dim]` of one part, and its log-sum-exp without `dim`."""


class Slots:
    """The cache slots of a sequence's tokens, in order of position."""

    def __init__(self, index: Tensor) -> None:
        self.index = index.to(torch.int64)

    def __len__(self) -> int:
        return int(self.index.numel())

    def ordered(self, start: int, stop: int) -> Segment:
        """Positions `start` to `stop` in order, as one segment."""
        first, last = int(self.index[start]), int(self.index[stop - 1])
        before = self._runs_before
        if before[stop - 1] == before[start]:
            return slice(first, last + 1)
        return self.index[start:stop]

    def unordered(self, start: int, stop: int) -> list[Segment]:
        """Positions `start` to `stop` in any order, read in place where that is faster."""
        if start == stop:
            return []
        own = self.index[start:stop]
        cuts = (torch.nonzero(own.diff() != 1).flatten() + 1).tolist()
        views: list[Segment] = []
        rest: list[Tensor] = []
        for begin, end in zip([0, *cuts], [*cuts, stop - start], strict=True):
            if end - begin >= VIEW_AT_LEAST or not cuts:
                views.append(slice(int(own[begin]), int(own[end - 1]) + 1))
            else:
                rest.append(own[begin:end])
        return [*views, torch.cat(rest)] if rest else views

    @cached_property
    def _runs_before(self) -> Tensor:
        """For each position, how many runs end before it."""
        breaks = torch.zeros_like(self.index)
        torch.cumsum(self.index.diff() != 1, dim=0, out=breaks[1:])
        return breaks


class Extend:
    """The new tokens of one sequence, planned once for all layers of a forward pass."""

    def __init__(self, slots: Slots, new: int) -> None:
        if not 0 < new <= len(slots):
            raise ValueError(f"{new} new tokens in a sequence of {len(slots)}")
        self.slots = slots
        self.new = new

    @cached_property
    def _prefix(self) -> list[Segment]:
        return self.slots.unordered(0, len(self.slots) - self.new)

    @cached_property
    def _own(self) -> Segment:
        return self.slots.ordered(len(self.slots) - self.new, len(self.slots))

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Return the attention output of `query [E, heads, dim]` over the cache.

        `keys` and `values` are the whole cache, `[slots, key heads, dim]`. With a
        `window`, a query sees its own position and `window` positions before it.
        """
        if window is not None and len(self.slots) > window + 1:
            return self._windowed(query, keys, values, scale, window)
        grouped = _group(query, keys.shape[1])
        parts = (
            _visible(grouped, _read(keys, at, query), _read(values, at, query), scale)
            for at in self._prefix
        )
        joined = _causal(
            grouped, _read(keys, self._own, query), _read(values, self._own, query), scale
        )
        for part in parts:
            joined = _join(joined, part)
        return _ungroup(joined[0])

    def _windowed(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int
    ) -> Tensor:
        prefix = len(self.slots) - self.new
        outputs = []
        for start in range(0, self.new, QUERY_BLOCK):
            block = query[start : start + QUERY_BLOCK]
            end = prefix + start + block.shape[0]
            first = max(0, prefix + start - window)
            at = self.slots.ordered(first, end)
            rows = torch.arange(prefix + start, end).unsqueeze(1)
            columns = torch.arange(first, end).unsqueeze(0)
            seen = (columns <= rows) & (columns >= rows - window)
            grouped = _group(block, keys.shape[1])
            output = scaled_dot_product_attention(
                grouped,
                _heads_first(_read(keys, at, query)).expand(*grouped.shape[:2], -1, -1),
                _heads_first(_read(values, at, query)).expand(*grouped.shape[:2], -1, -1),
                attn_mask=seen,
                scale=scale,
            )
            outputs.append(_ungroup(output))
        return torch.cat(outputs)


@dataclass(frozen=True)
class Decode:
    """One new token for each of several sequences, planned once for all layers of a pass.

    Short sequences of similar length are computed as one padded batch. Others are computed one by
    one, in place.
    """

    one_by_one: list[list[Segment]]
    index: Tensor | None
    mask: Tensor | None

    PAD_UP_TO = 2048
    """Sequences longer than this are not gathered into a batch."""

    @classmethod
    def of(cls, sequences: Sequence[Slots], window: int | None, dtype: torch.dtype) -> Decode:
        """Plan a step over `sequences`, each including its new token."""
        seen = [
            s if window is None or len(s) <= window + 1 else Slots(s.index[-window - 1 :])
            for s in sequences
        ]
        lengths = [len(s) for s in seen]
        longest = max(lengths)
        if len(seen) == 1 or longest > cls.PAD_UP_TO or longest * len(seen) > 3 * sum(lengths):
            return cls([s.unordered(0, len(s)) for s in seen], None, None)
        # Slot 0 is the allocator's padding row: always present, and masked here.
        index = torch.zeros(len(seen), longest, dtype=torch.int64)
        mask = torch.full((len(seen), 1, 1, longest), float("-inf"), dtype=dtype)
        for row, (length, slots) in enumerate(zip(lengths, seen, strict=True)):
            index[row, :length] = slots.index
            mask[row, ..., :length] = 0
        return cls([], index, mask)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Return the attention output of `query [sequences, heads, dim]` over the cache."""
        if self.index is None:
            return torch.cat(
                [
                    _one_token(query[row : row + 1], keys, values, segments, scale)
                    for row, segments in enumerate(self.one_by_one)
                ]
            )
        sequences, heads, dim = query.shape
        key_heads = keys.shape[1]
        flat = self.index.flatten()
        shape = (*self.index.shape, key_heads, dim)
        output = scaled_dot_product_attention(
            query.reshape(sequences, key_heads, heads // key_heads, dim),
            _read(keys, flat, query).view(shape).transpose(1, 2),
            _read(values, flat, query).view(shape).transpose(1, 2),
            attn_mask=self.mask,
            scale=scale,
        )
        return output.reshape(sequences, heads, dim)


def _one_token(
    query: Tensor, keys: Tensor, values: Tensor, segments: list[Segment], scale: float
) -> Tensor:
    grouped = _group(query, keys.shape[1])
    joined: Part | None = None
    for at in segments:
        part = _visible(grouped, _read(keys, at, query), _read(values, at, query), scale)
        joined = part if joined is None else _join(joined, part)
    assert joined is not None, "a sequence includes its new token"
    return _ungroup(joined[0])


def _read(cache: Tensor, at: Segment, like: Tensor) -> Tensor:
    """The rows of the cache at `at`; a view unless they are scattered or of another dtype."""
    # Indexing with `[]` is some fifteen times slower than `index_select` here.
    rows = cache[at] if isinstance(at, slice) else cache.index_select(0, at)
    return rows.to(like.dtype)


def _group(query: Tensor, key_heads: int) -> Tensor:
    """`[E, heads, dim]` as contiguous `[key heads, group, E, dim]`."""
    new, heads, dim = query.shape
    return query.view(new, key_heads, heads // key_heads, dim).permute(1, 2, 0, 3).contiguous()


def _ungroup(output: Tensor) -> Tensor:
    key_heads, group, new, dim = output.shape
    return output.permute(2, 0, 1, 3).reshape(new, key_heads * group, dim)


def _heads_first(rows: Tensor) -> Tensor:
    """`[tokens, key heads, dim]` as `[key heads, 1, tokens, dim]`, in place."""
    return rows.transpose(0, 1).unsqueeze(1)


def _visible(grouped: Tensor, keys: Tensor, values: Tensor, scale: float) -> Part:
    """Every query sees every key: the group's heads become rows of their key head."""
    key_heads, group, new, dim = grouped.shape
    output, logsumexp = _flash(
        grouped.view(1, key_heads, group * new, dim),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        scale=scale,
    )
    return output.reshape(grouped.shape), logsumexp.reshape(key_heads, group, new)


def _causal(grouped: Tensor, keys: Tensor, values: Tensor, scale: float) -> Part:
    """Query `i` sees keys 0 to `i`, as many keys as queries."""
    heads = grouped.shape[:2]
    output, logsumexp = _flash(
        grouped,
        _heads_first(keys).expand(*heads, -1, -1),
        _heads_first(values).expand(*heads, -1, -1),
        is_causal=True,
        scale=scale,
    )
    return output, logsumexp


def _join(one: Part, other: Part) -> Part:
    """The softmax over two sets of keys, from the softmax over each."""
    total = torch.logaddexp(one[1], other[1])
    output = one[0] * (one[1] - total).exp().unsqueeze(-1).to(one[0].dtype)
    output += other[0] * (other[1] - total).exp().unsqueeze(-1).to(output.dtype)
    return output, total
