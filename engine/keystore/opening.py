"""From the setting to the key store: ``file:///path``, or ``none`` for texts in the clear."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from engine.errors import InputError
from engine.keystore.keyring import Keyring

PLAIN: Final = "none"


def open_keyring(url: str) -> Keyring | None:
    """The keys that the setting names; None for ``none``, which keeps texts in the clear.

    Raises InputError ``key-store-invalid`` for another kind of URL, UnavailableError for a store that cannot be used.
    """
    if url == PLAIN:
        return None
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.scheme != "file" or parts.netloc not in {"", "localhost"} or not path.startswith("/"):
        raise InputError(
            "key-store-invalid",
            "PODIUM_KEY_STORE names no key store that this version knows",
            hint="write it as file:///a/folder outside of the database's backups, or none for texts in the clear",
        )
    from engine.keystore.files import FileKeyStore  # noqa: PLC0415  # one kind of several to come

    return Keyring(FileKeyStore(Path(path)))
