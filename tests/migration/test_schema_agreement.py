"""Models and migrations describe the same schema, whichever of the two a person looked at."""

from __future__ import annotations

import subprocess
import sys

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from engine.store.schema import scripts, upgrade_schema
from engine.store.tables import Base
from tests.migration.catalogue import STRUCTURE, catalogue
from tests.support.processes import CHECKOUT, environment

APPEND_ONLY = ("ledger_entries", "log_leaves", "log_nodes", "log_checkpoints")


def test_autogenerate_finds_nothing_to_migrate(database_url: str) -> None:
    engine = create_engine(database_url, poolclass=NullPool)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_the_models_make_the_same_columns_constraints_and_indexes(empty_database_url: str, database_url: str) -> None:
    engine = create_engine(empty_database_url, poolclass=NullPool)
    Base.metadata.create_all(engine)
    engine.dispose()
    by_models, by_migrations = catalogue(empty_database_url, *STRUCTURE), catalogue(database_url, *STRUCTURE)
    assert by_models["constraints"]
    assert by_models["indexes"]
    assert by_models == by_migrations


def test_the_comparison_sees_a_check_constraint_that_only_one_side_has(database_url: str) -> None:
    before = catalogue(database_url, *STRUCTURE)
    engine = create_engine(database_url, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE steps DROP CONSTRAINT ck_steps_position"))
    engine.dispose()
    after = catalogue(database_url, *STRUCTURE)
    assert before["constraints"].keys() - after["constraints"].keys() == {"steps.ck_steps_position"}


def test_what_models_cannot_say_is_there(database_url: str) -> None:
    found = catalogue(database_url, "triggers", "functions")
    append_only = {f"{table}.append_only" for table in APPEND_ONLY}
    heads = {f"ledger_heads.{name}" for name in ("genesis", "forward", "keep")}
    always = append_only | heads | {"ledger_entries.enqueue", "log_checkpoints.size"}
    moves = {f"{table}.legal_transition" for table in ("runs", "steps", "attempts")}
    reviews = {
        f"{table}.{name}"
        for table in ("persons", "reviews", "review_decisions", "review_openings", "sampling_salts")
        for name in ("keep_rows", "keep_table")
    } | {"reviews.check_change", "review_decisions.check_decision", "persons.check_link"}
    always |= reviews
    assert set(found["triggers"]) == always | moves
    for name in always:
        # Also in a session that says it is a replica.
        assert found["triggers"][name].endswith("enabled A"), name
    functions = {name.partition("(")[0]: text for name, text in found["functions"].items()}
    assert set(functions) == {
        *("check_transition", "ledger_append", "log_extend", "ledger_enqueue", "ledger_refuse", "log_check_size"),
        *("check_review_change", "check_review_decision", "refuse_review_change", "person_of", "run_authors"),
        "check_person_link",
    }
    # No table that a session makes for itself is found before Podium's.
    watchers = ("check_review_change", "check_review_decision", "check_person_link", "check_transition")
    for name in (*watchers, "person_of", "run_authors"):
        assert "search_path=pg_catalog, public, pg_temp" in functions[name], name
    for name in ("ledger_append", "log_extend"):
        assert "definer true" in functions[name]
        assert "search_path=pg_catalog, public, pg_temp" in functions[name]


def test_there_is_exactly_one_head() -> None:
    assert len(scripts().get_heads()) == 1
    assert scripts().get_bases() == ["0001"]


def test_alembic_check_agrees_from_a_developers_command_line(database_url: str) -> None:
    # Nobody talks to Temporal here, so its address is not asked for.
    settings = {"PODIUM_DATABASE_URL": database_url}
    done = subprocess.run(
        [sys.executable, "-m", "alembic", "check"],
        env=environment() | settings,
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "No new upgrade operations detected" in done.stdout + done.stderr


def test_each_downgrade_restores_the_schema_before_it_or_refuses(empty_database_url: str) -> None:
    upgrade_schema(empty_database_url)
    engine = create_engine(empty_database_url, poolclass=NullPool)
    full = catalogue(empty_database_url)
    for script in scripts().walk_revisions():
        with engine.connect() as connection, connection.begin() as transaction:
            with Operations.context(MigrationContext.configure(connection)):
                if script.down_revision is None:
                    # Nothing is before it, so it must refuse: it would delete every record.
                    with pytest.raises(NotImplementedError):
                        script.module.downgrade()
                    break
                try:
                    script.module.downgrade()
                except NotImplementedError:
                    break
                script.module.upgrade()
            transaction.commit()
        assert catalogue(empty_database_url) == full, f"down from {script.revision} and up again is not the same"
    engine.dispose()
