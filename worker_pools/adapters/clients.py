"""A set of HTTP clients over which calls are spread.

One httpx client does quadratic work in its connection pool above about 25 calls at once (measured: 132 against 37
calls a second at 25 and 50), so each client carries at most `CALLS_A_CLIENT`. No timeouts but those of connecting and
writing are set here; the adapter owns the rest. Never follows redirects, never keeps cookies, never retries.

An answer may take half an hour to begin, and routers forget a connection that is silent for some minutes. So the kernel
asks the other side for a sign of life (TCP keepalive), which also finds out about one that is gone.

Connections are used again only over TLS, where a new one is dear. A server that closes an idle connection just as the
next request goes out loses a call that may have been billed; llama.cpp's does so after every stream (6 of 20 calls).
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import urllib.request
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


# First after a minute of silence: below the shortest of the usual limits (NAT gateways forget after 4 to 6 minutes).
KEEPALIVE_IDLE_S = 60
KEEPALIVE_INTERVAL_S = 30
KEEPALIVE_PROBES = 5


@dataclass(frozen=True)
class _Kind:
    """What sets clients apart: the proxy that leads to the endpoint, and whether connections are kept."""

    proxy: str | None
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
        slot = self._pick(_Kind(proxy_of(url), tls=url.lower().startswith("https:")))
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
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=CALLS_A_CLIENT if kind.tls else 0,
            keepalive_expiry=KEEPALIVE_S,
        )
        try:
            transport = httpx.AsyncHTTPTransport(
                verify=self._tls, proxy=kind.proxy, limits=limits, socket_options=keepalive_options()
            )
        except (ValueError, ImportError, httpx.InvalidURL):
            # Its own message quotes the address, in which a password may stand.
            raise httpx.ProxyError("the proxy that the environment names cannot be used") from None
        return httpx.AsyncClient(
            transport=transport,
            # The proxy was looked up already, and nothing else is to come from the environment.
            trust_env=False,
            follow_redirects=False,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S, write=WRITE_TIMEOUT_S),
        )

    async def aclose(self) -> None:
        """Closes all connections."""
        slots = [slot for group in self._slots.values() for slot in group]
        self._slots = {}
        for slot in slots:
            await slot.client.aclose()


def keepalive_options() -> list[tuple[int, int, int]]:
    """Socket options for TCP keepalive, as far as this system has them."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


def proxy_of(url: str) -> str | None:
    """The proxy for an address by the environment (`HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY`); none for loopback."""
    if is_loopback(url):
        return None
    parts = httpx.URL(url)
    if urllib.request.proxy_bypass(parts.netloc.decode("ascii")):
        return None
    proxies = urllib.request.getproxies()
    found = proxies.get(parts.scheme) or proxies.get("all")
    return found if found is None or "://" in found else f"http://{found}"


def is_loopback(url: str) -> bool:
    """Whether the address is this machine's own loopback interface."""
    host = httpx.URL(url).host
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
