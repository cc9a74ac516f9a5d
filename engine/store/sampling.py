"""The secret that decides, with a run's id, what is sampled for review. Made once; nobody can choose it afterwards.

Its hash goes into the tenant's own chain when it is made, and into the entry of every draw: who is given the secret
later can draw again and compare.
"""

from __future__ import annotations

import secrets
from hashlib import sha256
from uuid import UUID

from engine.store.database import Database
from engine.store.exchange import Connection, exchange
from engine.store.run_writer import ENGINE_ACTOR
from engine.store.system_chain import lock_system

SALT_BYTES = 32
_READ = "SELECT salt FROM sampling_salts WHERE tenant_id = %s"
_MAKE = "INSERT INTO sampling_salts (tenant_id, salt) VALUES (%s, %s)"


async def read_sampling_salt(database: Database, tenant_id: UUID) -> bytes | None:
    """The tenant's 32 bytes; None before anything was sampled."""
    (rows,) = await database.fetch((_READ, (tenant_id,)))
    return bytes(rows[0]["salt"]) if rows else None


async def sampling_salt(database: Database, tenant_id: UUID) -> bytes:
    """The tenant's 32 bytes, made when they are first asked for."""

    async def work(connection: Connection) -> bytes:
        writer = await lock_system(connection, tenant_id, actor_id=ENGINE_ACTOR)
        (rows,) = await exchange(connection, [(_READ, (tenant_id,))])
        if rows:
            return bytes(rows[0]["salt"])
        salt = secrets.token_bytes(SALT_BYTES)
        writer.statement(_MAKE, (tenant_id, salt))
        writer.entry("sampling.salt_made", salt=sha256(salt).hexdigest())
        await writer.commit()
        return salt

    known = await read_sampling_salt(database, tenant_id)
    return await database.write(work) if known is None else known
