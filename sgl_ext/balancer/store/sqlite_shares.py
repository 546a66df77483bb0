"""Whose documents a full store evicts: those of tenants that hold more than their share.

The share is an equal part of what all tenants hold. A tenant that stores more than that evicts its
own least recently used documents, and one within its share those of the tenant that holds most. So
no tenant can drive out what another holds within its share.

A document's owner is its kind, a blank, and the tenant. The table `held` has each tenant's bytes.
Triggers keep it up to date, also for what a process of an earlier version writes.
"""

import sqlite3

from sgl_ext.balancer.store.documents import victim_of

# A document's own row and its places in the indexes.
_ROW_BYTES = 256


def _tenant(owner: str) -> str:
    return f"substr({owner}, instr({owner}, ' ') + 1)"


_SIZE = f"{_ROW_BYTES} + length(items) + length(about)"
_TABLES = (
    f"CREATE INDEX IF NOT EXISTS by_tenant ON documents ({_tenant('owner')}, used_s)",
    "CREATE TABLE held (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL)",
    f"""INSERT INTO held SELECT {_tenant("owner")}, sum({_SIZE})
        FROM documents JOIN content USING (number) GROUP BY 1""",
    f"""CREATE TRIGGER hold AFTER INSERT ON content BEGIN
        INSERT INTO held
            SELECT {_tenant("owner")}, {_ROW_BYTES} + length(new.items) + length(new.about)
            FROM documents WHERE number = new.number
            ON CONFLICT (tenant) DO UPDATE SET bytes = bytes + excluded.bytes; END""",
    f"""CREATE TRIGGER let_go BEFORE DELETE ON documents BEGIN
        UPDATE held SET bytes = bytes -
            coalesce((SELECT {_SIZE} FROM content WHERE number = old.number), 0)
            WHERE tenant = {_tenant("old.owner")};
        DELETE FROM held WHERE tenant = {_tenant("old.owner")} AND bytes <= 0; END""",
)
# The last document of a chain is evicted first, because it needs those before it.
_EVICT = f"""DELETE FROM documents WHERE number IN
    (SELECT number FROM documents WHERE {_tenant("owner")} = ? AND number != ?
     ORDER BY used_s, number DESC LIMIT ?)"""


def prepare(db: sqlite3.Connection) -> None:
    """Creates what is missing in a store, within a transaction."""
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'held'").fetchone() is None:
        for statement in _TABLES:
            db.execute(statement)


def evict(db: sqlite3.Connection, owner: str, number: int | None) -> int:
    """Evicts a few documents for the owner's document of this number; returns how many.

    0 if there is none to evict: the document is larger than its tenant's share of a full store.
    """
    writer = owner[owner.find(" ") + 1 :]
    held: dict[str, int] = dict(db.execute("SELECT tenant, bytes FROM held"))
    tenant, batch = victim_of(held, writer)
    return db.execute(_EVICT, (tenant, number, batch)).rowcount
