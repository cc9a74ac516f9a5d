"""What the ledger says is held: the entries of a tenant's own chain, folded. Pure.

Rows of holds can be changed by whoever may write tables, without an entry. So what is held is what the rows or the
entries say is held: nobody frees a run by changing one of them alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from engine.store.exchange import Row

# Of a tenant, and of the tenants of runs; a tenant's own chain has the tenant's id.
READ_ENTRIES: Final = """
    SELECT body FROM ledger_entries
    WHERE run_id = %s AND type IN ('hold.placed', 'hold.widened', 'hold.released') ORDER BY seq
"""
READ_ENTRIES_FOR: Final = """
    SELECT body FROM ledger_entries
    WHERE run_id IN (SELECT tenant_id FROM runs WHERE id = ANY(%s))
      AND type IN ('hold.placed', 'hold.widened', 'hold.released') ORDER BY run_id, seq
"""


@dataclass(slots=True)
class LedgerHold:
    """A hold that stands by the entries: its matter, the runs that were named, and whether every run is held."""

    matter: str
    runs: set[str] = field(default_factory=set)
    all_runs: bool = False

    def holds(self, tree: Collection[UUID]) -> bool:
        """Whether it holds one of these runs, which are of its tenant."""
        return self.all_runs or any(str(run) in self.runs for run in tree)


def standing(rows: Iterable[Row]) -> dict[UUID, LedgerHold]:
    """The holds that stand, by id; ``rows`` are the answer to one of the statements above."""
    found: dict[UUID, LedgerHold] = {}
    for row in rows:
        entry: dict[str, Any] = json.loads(bytes(row["body"]))
        data: dict[str, Any] = entry["data"]
        try:
            own = UUID(str(data.get("hold")))
        except ValueError:
            # Whoever may append may append nonsense: it neither holds nor frees anything.
            continue
        if entry["type"] == "hold.released":
            found.pop(own, None)
            continue
        hold = found.setdefault(own, LedgerHold(str(data.get("matter"))))
        runs = data.get("runs")
        hold.runs |= {str(run) for run in runs} if isinstance(runs, list) else set()
        hold.all_runs = hold.all_runs or data.get("all_runs") is True
    return found
