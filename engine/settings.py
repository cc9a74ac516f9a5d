"""Settings from the environment, read in one place. Must never import anything of Podium but errors."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from engine.errors import InputError

# The longest text of a task, in bytes of UTF-8.
TASK_BYTES_MAX = 4 * 1024 * 1024
# Long enough for somebody who reads an answer and then types the next command.
KEEPER_IDLE_S = 60.0
# Podium is run from a checkout; an index may hold something else of this name.
INSTALL_EXTRAS = "pip install -c constraints.txt -e '.[local,litellm]'"
# In the home of the embedded servers.
AUDIT_FOLDER = "audit"
# Asks for the trace of an internal error; read when one is reported, whatever became of the settings by then.
DEBUG_VARIABLE = "PODIUM_DEBUG"
# Actors that begin so are Podium itself: no person may appear as one of them.
ENGINE_PREFIX = "podium-"
_URL_HINT = "write it as postgresql://user:password@host:5432/database"
_ACTOR = re.compile(r"[A-Za-z0-9._:@+-]{1,128}")
# Temporal joins the two with a dot, so the first has none.
_DEPLOYMENT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_BUILD_ID = re.compile(r"[A-Za-z0-9._+-]{1,128}")


@dataclass(frozen=True, slots=True)
class WorkerBuild:
    """Which version of which deployment a worker is, in the words of Temporal's Worker Versioning."""

    deployment: str
    build_id: str


@dataclass(frozen=True, slots=True)
class TemporalSettings:
    """How to reach a Temporal service that the user runs. Key material is named by file or held in memory only.

    ``build`` is None for workers that are not versioned.
    """

    address: str
    namespace: str = "default"
    tls: bool = False
    tls_server_ca: Path | None = None
    tls_client_certificate: Path | None = None
    tls_client_key: Path | None = None
    api_key: str | None = None
    build: WorkerBuild | None = None

    def __repr__(self) -> str:
        """Leaves the key out: a repr may end up in a log."""
        return f"TemporalSettings(address={self.address!r}, namespace={self.namespace!r}, tls={self.tls!r})"


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that the environment decides. Without a database and a Temporal address the keeper provides both."""

    database_url: str | None
    temporal: TemporalSettings | None
    home: Path
    actor_id: str
    on_behalf_of: str | None
    keeper_idle_s: float
    # The port of the embedded Temporal; None takes a free one.
    temporal_port: int | None
    # Where the keys of stored texts are; None is the home's own folder, which servers of one's own do not have.
    key_store: str | None = None
    # Days after its end that a run keeps its texts, where its pool says nothing; None is for ever.
    retention_days: int | None = None
    # What `podium db upgrade` connects as, where it is another role than the application's.
    migration_url: str | None = None
    # Where the signer keeps its key and its memory; None is nowhere, so nothing here signs.
    audit_dir: Path | None = None
    # Where checkpoints are put for somebody to take them away, and the time-stamp service that they are sent to.
    anchor_dir: Path | None = None
    tsa_url: str | None = None

    @property
    def embedded(self) -> bool:
        """Whether servers, model and worker are those of the keeper of one home."""
        return self.database_url is None

    def key_store_url(self) -> str:
        """The key store's URL, or ``none``; raises InputError where servers of one's own have no setting for it."""
        if self.key_store is not None:
            return self.key_store
        if not self.embedded:
            raise InputError(
                "key-store-missing",
                "PODIUM_KEY_STORE is not set: texts are sealed with keys that are kept outside of the database",
                hint="file:///a/folder that workers and commands share, none of the database's backups in it; or none",
            )
        return (self.home / "keys").as_uri()

    def __repr__(self) -> str:
        """Leaves the database URL out: it may carry a password."""
        return f"Settings(home={str(self.home)!r}, embedded={self.embedded!r})"


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Reads ``PODIUM_*``; raises InputError when the values contradict each other or cannot be read."""
    env = os.environ if environ is None else environ
    database_url = env.get("PODIUM_DATABASE_URL") or None
    address = env.get("PODIUM_TEMPORAL_ADDRESS") or None
    if (database_url is None) != (address is None):
        missing = "PODIUM_TEMPORAL_ADDRESS" if address is None else "PODIUM_DATABASE_URL"
        raise InputError(
            "settings-incomplete",
            f"{missing} is not set, but its partner is",
            hint="set both to use your own servers, or neither to use the embedded ones",
        )
    home = Path(env.get("PODIUM_HOME") or ".podium").absolute()
    return Settings(
        database_url=None if database_url is None else _with_driver(database_url, "PODIUM_DATABASE_URL"),
        temporal=None if address is None else _temporal(env, address),
        home=home,
        actor_id=_actor(env, "PODIUM_ACTOR") or f"uid-{os.getuid()}",
        on_behalf_of=_actor(env, "PODIUM_ON_BEHALF_OF"),
        keeper_idle_s=_seconds(env, "PODIUM_KEEPER_IDLE_S", KEEPER_IDLE_S),
        temporal_port=_port(env, "PODIUM_TEMPORAL_PORT"),
        key_store=env.get("PODIUM_KEY_STORE") or None,
        retention_days=_days(env, "PODIUM_RETENTION_DAYS"),
        migration_url=_migration_url(env, embedded=database_url is None),
        audit_dir=_folder(env, "PODIUM_AUDIT_DIR") or (home / AUDIT_FOLDER if database_url is None else None),
        anchor_dir=_folder(env, "PODIUM_ANCHOR_DIR"),
        tsa_url=_web_address(env, "PODIUM_TSA_URL"),
    )


def _with_driver(url: str, name: str) -> str:
    """Accepts the URL forms that people have at hand and names the one driver that we use."""
    try:
        readable = urlsplit(url).port != 0
    except ValueError:
        readable = False
    if not readable:
        raise InputError("database-url-invalid", f"{name} has no port that can be read", hint=_URL_HINT)
    for prefix in ("postgres://", "postgresql://"):
        if url.startswith(prefix):
            return "postgresql+psycopg://" + url.removeprefix(prefix)
    if url.startswith("postgresql+psycopg://"):
        return url
    raise InputError(
        "database-url-invalid",
        f"{name} is not a PostgreSQL URL",
        hint=_URL_HINT,
    )


def _migration_url(env: Mapping[str, str], *, embedded: bool) -> str | None:
    value = env.get("PODIUM_MIGRATION_URL") or None
    if value is None:
        return None
    if embedded:
        raise InputError(
            "settings-incomplete",
            "PODIUM_MIGRATION_URL is set, but PODIUM_DATABASE_URL is not",
            hint="set both for a server of your own; the embedded one upgrades itself",
        )
    return _with_driver(value, "PODIUM_MIGRATION_URL")


def _folder(env: Mapping[str, str], name: str) -> Path | None:
    value = env.get(name)
    return Path(value).expanduser().absolute() if value else None


def _web_address(env: Mapping[str, str], name: str) -> str | None:
    value = env.get(name) or None
    if value is not None and not value.startswith(("http://", "https://")):
        raise InputError("setting-invalid", f"{name} is not an address of the form https://host/path")
    return value


def _temporal(env: Mapping[str, str], address: str) -> TemporalSettings:
    def path(name: str) -> Path | None:
        value = env.get(name)
        return Path(value) if value else None

    api_key = env.get("PODIUM_TEMPORAL_API_KEY") or None
    certificate, key = path("PODIUM_TEMPORAL_TLS_CERT"), path("PODIUM_TEMPORAL_TLS_KEY")
    if (certificate is None) != (key is None):
        raise InputError(
            "settings-incomplete",
            "a client certificate needs its key and a key needs its certificate",
            hint="set PODIUM_TEMPORAL_TLS_CERT and PODIUM_TEMPORAL_TLS_KEY together",
        )
    server_ca = path("PODIUM_TEMPORAL_TLS_CA")
    wanted = env.get("PODIUM_TEMPORAL_TLS", "").lower() in {"1", "true", "yes", "on"}
    return TemporalSettings(
        address=address,
        namespace=env.get("PODIUM_TEMPORAL_NAMESPACE") or "default",
        tls=wanted or any(value is not None for value in (api_key, certificate, server_ca)),
        tls_server_ca=server_ca,
        tls_client_certificate=certificate,
        tls_client_key=key,
        api_key=api_key,
        build=_build(env),
    )


def _build(env: Mapping[str, str]) -> WorkerBuild | None:
    deployment = env.get("PODIUM_DEPLOYMENT") or None
    build_id = env.get("PODIUM_BUILD_ID") or None
    if build_id is None:
        if deployment is not None:
            raise InputError(
                "settings-incomplete",
                "PODIUM_DEPLOYMENT is not enough to version a worker",
                hint="set PODIUM_BUILD_ID too, a new one for each version; or neither",
            )
        return None
    for name, value, form in (
        ("PODIUM_DEPLOYMENT", deployment or "podium", _DEPLOYMENT),
        ("PODIUM_BUILD_ID", build_id, _BUILD_ID),
    ):
        if not form.fullmatch(value):
            raise InputError(
                "setting-invalid",
                f"{name} is not a name that Temporal takes",
                hint="use letters, digits, - and _; in PODIUM_BUILD_ID also . and +",
            )
    return WorkerBuild(deployment or "podium", build_id)


def _actor(env: Mapping[str, str], name: str) -> str | None:
    value = env.get(name)
    if not value:
        return None
    if value.startswith(ENGINE_PREFIX):
        raise InputError(
            "actor-reserved",
            f"{name} begins with {ENGINE_PREFIX!r}, which stands for Podium itself in the record",
            hint="use another identifier, for example an id from your directory",
        )
    if not _ACTOR.fullmatch(value):
        raise InputError(
            "actor-invalid",
            f"{name} is not an identifier",
            hint="use letters, digits and . _ : @ + - (at most 128), for example an id from your directory",
        )
    return value


def _seconds(env: Mapping[str, str], name: str, default_s: float) -> float:
    value = env.get(name)
    if not value:
        return default_s
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86_400:  # noqa: PLR2004  # a day
        raise InputError("setting-invalid", f"{name} must be a number of seconds from 0 to 86400") from None
    return seconds


def _days(env: Mapping[str, str], name: str) -> int | None:
    value = env.get(name)
    if not value:
        return None
    if not (value.isdigit() and len(value) <= 5 and 1 <= int(value) <= 36_500):  # noqa: PLR2004  # a century
        raise InputError(
            "setting-invalid",
            f"{name} must be a number of days from 1 to 36500",
            hint=f"{name}=365, for example; unset it to keep texts for as long as their pool says",
        )
    return int(value)


def _port(env: Mapping[str, str], name: str) -> int | None:
    value = env.get(name)
    if not value:
        return None
    if not (value.isdigit() and 1 <= int(value) <= 65_535):  # noqa: PLR2004  # the ports there are
        raise InputError(
            "setting-invalid", f"{name} must be a port from 1 to 65535", hint=f"unset {name} to have one chosen"
        )
    return int(value)
