"""Which Temporal cluster and namespace executes this database's runs. Another one is refused, not adopted by chance."""

from __future__ import annotations

from engine.errors import UnavailableError
from engine.store.database import Database
from engine.store.exchange import Connection

_REMEMBER = """
    INSERT INTO temporal_cluster (cluster_id, namespace) VALUES (%s, %s) ON CONFLICT (singleton) DO NOTHING
"""
_REPLACE = """
    INSERT INTO temporal_cluster (cluster_id, namespace) VALUES (%s, %s)
    ON CONFLICT (singleton) DO UPDATE SET cluster_id = excluded.cluster_id, namespace = excluded.namespace,
                                     remembered_at = clock_timestamp()
"""


async def remember_cluster(database: Database, cluster_id: str, namespace: str, *, adopt: bool = False) -> None:
    """Remembers the cluster at first sight; raises UnavailableError for another one, unless told to ``adopt`` it.

    Adopting is right when the old cluster is gone for good: its live runs are then settled as lost, resumable.
    """

    async def work(connection: Connection) -> tuple[str, str]:
        await connection.execute(_REPLACE if adopt else _REMEMBER, (cluster_id, namespace))
        cursor = await connection.execute("SELECT cluster_id, namespace FROM temporal_cluster")
        row = await cursor.fetchone()
        assert row is not None
        return row[0], row[1]

    known = await database.write(work)
    if known != (cluster_id, namespace):
        raise UnavailableError(
            "temporal-other-cluster",
            f"this database belongs to another Temporal cluster or namespace ({known[1]})",
            hint="connect to that one; if it is gone for good: `podium doctor --adopt-temporal`",
        )
