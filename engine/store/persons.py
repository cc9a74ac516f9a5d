"""Which accounts are one person: separation of duties is by person, not by account.

An account without a link is its own person. A link is never undone and never changed, so nobody can become somebody
else after the fact. Written into the tenant's own chain, from which anybody can check approvals again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from engine.errors import InputError, RefusedError
from engine.store.database import Database
from engine.store.exchange import Connection, exchange
from engine.store.run_writer import ENGINE_ACTOR
from engine.store.system_chain import lock_system

_NAME: Final = re.compile(r"[A-Za-z0-9._:@+-]{1,128}")
_READ: Final = (
    "SELECT actor_id, person, linked_by, linked_at FROM persons WHERE tenant_id = %s ORDER BY person, actor_id"
)
_INSERT: Final = """
    INSERT INTO persons (tenant_id, actor_id, person, linked_by, linked_at) VALUES (%s, %s, %s, %s, %s)
"""


@dataclass(frozen=True, slots=True)
class Link:
    """An account that belongs to a person, and who said so when."""

    actor_id: str
    person: str
    linked_by: str
    linked_at: datetime


async def list_links(database: Database, tenant_id: UUID) -> Sequence[Link]:
    """All links, by person."""
    (rows,) = await database.fetch((_READ, (tenant_id,)))
    return [Link(**row) for row in rows]


async def link_account(
    database: Database, tenant_id: UUID, account: str, person: str, *, actor_id: str, on_behalf_of: str | None = None
) -> Link:
    """Says that an account is a person's. Harmless if it was said before.

    Raises InputError ``person-invalid``, and RefusedError ``person-linked`` (the account is another person's, or others
    are linked to it as to a person), ``person-is-account`` (the person is named by an account of another one).
    """
    for name in (account, person):
        if not _NAME.fullmatch(name):
            raise InputError(
                "person-invalid", f"{name[:64]!r} is not an identifier",
                hint="use letters, digits and . _ : @ + - (at most 128)",
            )  # fmt: skip
    if ENGINE_ACTOR in {account, person}:
        raise InputError("person-invalid", f"{ENGINE_ACTOR} is Podium itself, no account", hint="name a person")
    if account == person:
        raise InputError(
            "person-invalid",
            f"{account} is its own person already",
            hint="name the person by another account, or an id",
        )

    async def work(connection: Connection) -> Link:
        writer = await lock_system(connection, tenant_id, actor_id=actor_id, on_behalf_of=on_behalf_of)
        (rows,) = await exchange(connection, [(_READ, (tenant_id,))])
        links = {row["actor_id"]: Link(**row) for row in rows}
        if account in links and links[account].person == person:
            return links[account]
        _refuse(links, account, person)
        writer.statement(_INSERT, (tenant_id, account, person, actor_id, writer.now))
        writer.entry("person.linked", actor=account, person=person)
        await writer.commit()
        # Now whatever this account decides counts for the person, in open reviews as well.
        return Link(account, person, actor_id, writer.now)

    return await database.write(work)


def _refuse(links: dict[str, Link], account: str, person: str) -> None:
    if account in links:
        raise RefusedError(
            "person-linked",
            f"{account} is {links[account].person}'s account, and a link is never changed",
            hint="give a new person a new account",
        )
    people = {link.person for link in links.values()}
    if person in links:
        whose = links[person].person
        if whose == account:
            hint = "they are one person already; `podium person list` shows it"
        elif account in people:
            hint = f"{account} and {whose} are two people with accounts of their own; a link is never changed"
        else:
            hint = f"podium person link {account} {whose}"
        raise RefusedError("person-is-account", f"{person} is an account of {whose}", hint=hint)
    if account in people:
        raise RefusedError(
            "person-linked",
            f"other accounts are linked to {account} as to a person",
            hint=f"{account} and {person} are two people with accounts of their own; a link is never changed"
            if person in people
            else f"link the other way round: podium person link {person} {account}",
        )
