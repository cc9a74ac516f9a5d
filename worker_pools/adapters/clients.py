"""A set of HTTP clients over which calls are spread.

One httpx client does quadratic work in its connection pool above about 25 calls at once (measured: 132 against 37
calls a second at 25 and 50), so each client carries at most `CALLS_A_CLIENT`. No timeouts but those of connecting and
writing are set here; the adapter owns the rest. Never follows redirects, never keeps cookies, never retries.

Connections are used again only over TLS, where a new one is dear. A server that closes an idle connection just as the
next request goes out loses a call that may have been billed; llama.cpp's does so after every stream (6 of 20 calls).
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

CALLS_A_CLIENT = 20
CLIENTS_MAX = 64
CONNECT_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 60.0
# Providers keep idle connections for a minute and more; one that we close first cannot break the next call.
KEEPALIVE_S = 15.0


@dataclass(frozen=True)
class _Kind:
    """What sets clients apart: whether proxies may be used, and whether connections are kept."""

    loopback: bool
    tls: bool


@dataclass
class _Slot:
    client: httpx.AsyncClient
    calls: int = 0


class HttpClients:
    """Clients for the world (proxies as the environment says) and for loopback (never through a proxy)."""

    def __init__(self) -> None:
        self._slots: dict[_Kind, list[_Slot]] = {}
        self._tls: ssl.SSLContext | None = None

    @asynccontextmanager
    async def lease(self, url: str) -> AsyncIterator[httpx.AsyncClient]:
        """A client with room for one more call, for as long as the context lasts."""
        slot = self._pick(_Kind(loopback=is_loopback(url), tls=url.lower().startswith("https:")))
        slot.calls += 1
        try:
            yield slot.client
        finally:
            slot.calls -= 1

    def _pick(self, kind: _Kind) -> _Slot:
        slots = self._slots.setdefault(kind, [])
        # The first with room, so that few connections stay warm instead of many cold.
        for slot in slots:
            if slot.calls < CALLS_A_CLIENT:
                return slot
        if len(slots) < CLIENTS_MAX:
            slots.append(_Slot(self._new_client(kind)))
            return slots[-1]
        return min(slots, key=lambda slot: slot.calls)

    def _new_client(self, kind: _Kind) -> httpx.AsyncClient:
        if self._tls is None:
            # Reading the certificates takes 20 ms; once is enough.
            self._tls = httpx.create_ssl_context()
        return httpx.AsyncClient(
            verify=self._tls,
            trust_env=not kind.loopback,
            follow_redirects=False,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S, write=WRITE_TIMEOUT_S),
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=CALLS_A_CLIENT if kind.tls else 0,
                keepalive_expiry=KEEPALIVE_S,
            ),
        )

    async def aclose(self) -> None:
        """Closes all connections."""
        slots = [slot for group in self._slots.values() for slot in group]
        self._slots = {}
        for slot in slots:
            await slot.client.aclose()


def is_loopback(url: str) -> bool:
    """Whether the address is this machine's own loopback interface."""
    host = httpx.URL(url).host
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
