"""What a key store must do. `engine.keystore.files` is the one that keeps files; a KMS can stand behind the same names.

The rules that every implementation keeps:

- It lies outside the database and outside the database's backups, else erasing erases nothing.
- ``create`` and ``rotate`` return only when a power cut cannot undo them. Erasing rests on ``rotate``: after it no copy
  of the old secret is left that this store could ever give out.
- Everything may be repeated; all methods may be called by several processes at once.
- The journal remembers every erasure, so that a restored backup of the database is erased again before it serves.
- ``OSError`` and its like become UnavailableError ``key-store-unavailable``: whoever needs a key waits and tries again.

Methods block; `engine.keystore.keyring` calls them in threads. An implementation with a KMS would keep each run's
secret wrapped by a key of the KMS in a bucket or table of its own, destroy by deleting that object and all its
versions, and keep the journal as objects named by number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID

from engine.keystore.keys import RunKeys


@dataclass(frozen=True, slots=True)
class ErasureRecord:
    """An erasure of one run as the journal keeps it: all that is needed to do it again in a restored database.

    ``fields`` are the JSON fields of the erasure's row; ``artifacts`` are the ids of what was erased; ``basis`` are the
    rows of the sealed texts that say why (bytes in hex).
    """

    erasure_id: UUID
    run_id: UUID
    epoch: int
    artifacts: Sequence[UUID]
    fields: Mapping[str, Any]
    basis: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Journal:
    """A part of the journal: its records, and the position behind the last one."""

    records: Sequence[ErasureRecord]
    end: int


class KeyStore(Protocol):
    """Secrets of runs, and the journal of erasures."""

    @property
    def place(self) -> str:
        """Where it is, for people; never a secret."""
        ...

    def identity(self) -> UUID:
        """The id that the store was given when it was made; a database remembers it."""
        ...

    def create(self, run_id: UUID) -> RunKeys:
        """Makes the keys of a run that is about to be written, durably; those that are there if there are any."""
        ...

    def settle(self, keys: RunKeys) -> None:
        """The run is on record: its keys are no orphan's any more. They are written again if they are gone."""
        ...

    def read(self, run_id: UUID) -> RunKeys | None:
        """The keys of a run; None if there are none. Raises UnavailableError ``key-damaged`` for a broken record."""
        ...

    def rotate(self, run_id: UUID, epoch: int, keep: Mapping[UUID, int]) -> RunKeys:
        """Destroys the secret of ``epoch``, keeping only the keys of ``keep`` (id and epoch), durably.

        Does nothing where a later epoch is there already. Raises UnavailableError ``text-key-missing`` where no keys
        are.
        """
        ...

    def orphans(self, older_than_s: float) -> Iterator[UUID]:
        """Runs whose keys were made so long ago and which nobody has said to be on record."""
        ...

    def drop_orphan(self, run_id: UUID) -> None:
        """Forgets the keys of a run that was never written."""
        ...

    def journal_end(self) -> int:
        """The position behind the journal's last record."""
        ...

    def read_journal(self, start: int) -> Journal:
        """The records from a position on."""
        ...

    def append_journal(self, record: ErasureRecord) -> None:
        """Adds a record, durably. The same one may be there twice."""
        ...
