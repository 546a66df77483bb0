"""The source that is a list of URLs: the engines of `--worker`."""

import asyncio
from collections.abc import AsyncIterator, Iterable

from sgl_ext.membership.member import Member

NAME = "workers"


class StaticList:
    """Workers that are always there. The id of each is its URL."""

    def __init__(self, urls: Iterable[str]) -> None:
        self.name = NAME
        unique = dict.fromkeys(url.rstrip("/") for url in urls)
        self.members = tuple(Member(id=url, url=url) for url in unique)

    async def lists(self) -> AsyncIterator[tuple[Member, ...]]:
        yield self.members
        await asyncio.Event().wait()  # it never changes
