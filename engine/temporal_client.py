"""Connecting to Temporal: always with our converters, never with an identity that names a host or a person."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from uuid import UUID

import temporalio.api.workflowservice.v1 as workflowservice
from temporalio.client import Client
from temporalio.runtime import LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter
from temporalio.service import RPCError, TLSConfig

from engine.converter import DATA_CONVERTER
from engine.errors import InputError, UnavailableError
from engine.settings import TemporalSettings

CONNECT_WAIT_S = 10.0
_RETRY_PAUSE_S = 0.1

# From here on a delay that a failed call asks for is kept although it is longer than the policy's own longest pause
# (temporalio/temporal#6063): before, a provider's Retry-After would be cut short without a word.
SERVER_VERSION_MIN = (1, 24, 2)
# What Temporal's documentation asks for Worker Versioning. Older servers take such a worker for one without a version.
SERVER_VERSION_MIN_FOR_BUILDS = (1, 29, 1)
_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})(-\S+)?")


async def connect_temporal(
    settings: TemporalSettings, *, identity: UUID | None = None, wait_s: float = CONNECT_WAIT_S
) -> Client:
    """A client for the user's or the keeper's Temporal; waits up to ``wait_s`` for it to answer.

    Raises UnavailableError ``temporal-unreachable`` or ``temporal-too-old``, and InputError for key files that cannot
    be read.
    """
    tls = _tls(settings)
    give_up_at = time.monotonic() + wait_s
    while True:
        try:
            client = await Client.connect(
                settings.address,
                namespace=settings.namespace,
                tls=tls,
                api_key=settings.api_key,
                data_converter=DATA_CONVERTER,
                identity="podium" if identity is None else f"podium-{identity}",
                runtime=_runtime(),
            )
            info = await client.workflow_service.get_system_info(workflowservice.GetSystemInfoRequest())
        except (RuntimeError, RPCError):
            if time.monotonic() > give_up_at:
                raise UnavailableError(
                    "temporal-unreachable",
                    f"Temporal does not answer at {settings.address}",
                    hint="check PODIUM_TEMPORAL_ADDRESS and that the server is up; `podium doctor` looks closer",
                ) from None
            await asyncio.sleep(_RETRY_PAUSE_S)
        else:
            check_server_version(info.server_version, versioned=settings.build is not None)
            return client


def check_server_version(version: str, *, versioned: bool) -> None:
    """Raises UnavailableError ``temporal-too-old`` for a server that lacks what Podium relies on.

    ``versioned``: whether workers say which build they are. A build between releases (``1.24.0-rc.1``, Temporal Cloud)
    is judged by its minor version, and whatever is no version is let through: it says nothing about the server.
    """
    found = _VERSION.fullmatch(version)
    least = SERVER_VERSION_MIN_FOR_BUILDS if versioned else SERVER_VERSION_MIN
    if found is None:
        return
    parts = 2 if found[4] is not None else 3
    if tuple(map(int, found.groups()[:parts])) < least[:parts]:
        wanted = ".".join(map(str, least))
        purpose = " for workers with a PODIUM_BUILD_ID" if versioned else ""
        raise UnavailableError(
            "temporal-too-old",
            f"this Temporal server is {version[:40]}; Podium needs {wanted} or newer{purpose}",
            hint="upgrade the server that PODIUM_TEMPORAL_ADDRESS names",
        )


async def cluster_id(client: Client) -> str:
    """The id that the cluster gave itself when its database was made.

    A service that does not tell (Temporal Cloud) is known by its namespace alone, which is unique there.
    """
    try:
        info = await client.workflow_service.get_cluster_info(workflowservice.GetClusterInfoRequest())
    except RPCError:
        return "undisclosed"
    return info.cluster_id or "undisclosed"


_runtimes: list[Runtime] = []


def _runtime() -> Runtime:
    """One runtime a process, whose own log lines stay quiet: what matters is on our record."""
    if not _runtimes:
        telemetry = TelemetryConfig(logging=LoggingConfig(TelemetryFilter(core_level="ERROR", other_level="ERROR")))
        # The SDK's worker heartbeats would tell Temporal this host's name and process id.
        _runtimes.append(Runtime(telemetry=telemetry, worker_heartbeat_interval=None))
    return _runtimes[0]


def _tls(settings: TemporalSettings) -> TLSConfig | bool:
    if not settings.tls:
        return False
    return TLSConfig(
        server_root_ca_cert=_read(settings.tls_server_ca),
        client_cert=_read(settings.tls_client_certificate),
        client_private_key=_read(settings.tls_client_key),
    )


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            "tls-file-unreadable",
            f"{path} cannot be read ({error.strerror})",
            hint="PODIUM_TEMPORAL_TLS_CA, _CERT and _KEY name files that you may read",
        ) from None
