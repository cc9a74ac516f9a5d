"""Keys of stored texts, kept outside the database and its backups. See `engine.keystore.interface`."""

from __future__ import annotations

from engine.keystore.interface import ErasureRecord, Journal, KeyStore
from engine.keystore.keyring import Keyring
from engine.keystore.keys import RunKeys
from engine.keystore.opening import PLAIN, open_keyring

__all__ = ["PLAIN", "ErasureRecord", "Journal", "KeyStore", "Keyring", "RunKeys", "open_keyring"]
