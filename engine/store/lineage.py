"""The runs above and below a run, as the beginning of a query. Pure SQL: must never say what is read of them.

Both give ``(id, height)`` and take the run's id as their first parameter; the run itself has the height 0. Open reads
its ancestors by a query of its own, which most runs, having none, leave at once.
"""

from __future__ import annotations

from typing import Final, LiteralString

# Named `line`: the run, its parent, that one's parent, up to the root.
LINE_ABOVE: Final[LiteralString] = """
    WITH RECURSIVE line AS (
        SELECT id, parent_run_id, 0 AS height FROM runs WHERE id = %s
        UNION ALL
        SELECT up.id, up.parent_run_id, line.height + 1 FROM runs up JOIN line ON up.id = line.parent_run_id
    )
"""

# Named `family`: the run and everything below it.
FAMILY: Final[LiteralString] = """
    WITH RECURSIVE family AS (
        SELECT id, 0 AS height FROM runs WHERE id = %s
        UNION ALL
        SELECT child.id, family.height + 1 FROM runs child JOIN family ON child.parent_run_id = family.id
    )
"""
