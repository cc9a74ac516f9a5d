"""Alembic's environment for developers (`alembic check`, `alembic revision --autogenerate`).

The program itself upgrades through ``engine.store.schema``, which takes the lock and sets the timeouts.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import create_engine

from engine.settings import load_settings
from engine.store.tables import Base

settings = load_settings()
if settings.database_url is None:
    raise SystemExit("set PODIUM_DATABASE_URL to the database to compare with")
engine = create_engine(settings.database_url)
with engine.connect() as connection:
    context.configure(connection=connection, target_metadata=Base.metadata, transaction_per_migration=True)
    with context.begin_transaction():
        context.run_migrations()
