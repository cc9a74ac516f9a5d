"""Alembic's environment for developers (`alembic check`, `alembic revision --autogenerate`).

The program itself upgrades through ``engine.store.schema``, which takes the lock and sets the timeouts.
"""

from __future__ import annotations

import os

from alembic import context
from sqlalchemy import create_engine

from engine.errors import PodiumError
from engine.settings import load_settings
from engine.store.tables import Base

URL = "PODIUM_DATABASE_URL"
NOBODY = "127.0.0.1:1"  # Settings want a pair of addresses; nothing here ever asks Temporal.
if not os.environ.get(URL):
    raise SystemExit(f"set {URL} to the database to compare with")
try:
    settings = load_settings({URL: os.environ[URL], "PODIUM_TEMPORAL_ADDRESS": NOBODY})
except PodiumError as error:
    raise SystemExit(f"{error.message}; {error.hint}") from None
assert settings.database_url is not None
engine = create_engine(settings.database_url)
with engine.connect() as connection:
    context.configure(connection=connection, target_metadata=Base.metadata, transaction_per_migration=True)
    with context.begin_transaction():
        context.run_migrations()
