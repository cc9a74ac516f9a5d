"""References to secrets and the in-memory store that resolves them.

A pool names a secret by environment variable or by file; it never holds one. A secret's value must never be printed,
stored, logged or put into an exception: every representation in this module shows the name only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

# A key is a short line. Anything longer is a wrong file, and must not be read into memory whole.
SECRET_BYTES_MAX = 65_536


class SecretRef(BaseModel):
    """Where a secret is to be found: an environment variable's name or a file's path, exactly one of the two."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")] | None = Field(
        default=None, description="Name of the environment variable that holds the secret."
    )
    file: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        default=None, description="Absolute path of the file that holds the secret, alone on its first line."
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> SecretRef:
        if (self.env is None) == (self.file is None):
            raise ValueError("name either `env` or `file`, not both and not neither")
        if self.file is not None and not Path(self.file).is_absolute():
            raise ValueError("the path of a secret file must be absolute")
        return self

    @property
    def name(self) -> str:
        """The key under which a store keeps this secret: the variable's name, or `file:` and the path."""
        return self.env if self.env is not None else f"file:{self.file}"


class SecretStore:
    """Secrets that were handed over (kept in memory only), then the environment, then files.

    A keeper serves clients whose environments differ from its own, so what a client put in wins over the
    keeper's own variables.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._given: dict[str, str] = {}

    def put(self, name: str, value: str) -> None:
        """Keep `value` under `name` (see `SecretRef.name`) for the life of this process."""
        self._given[name] = value

    def get(self, ref: SecretRef) -> str | None:
        """The secret's value without surrounding white space, or None where it is missing, empty or unreadable."""
        value = self._given.get(ref.name)
        if value is None and ref.env is not None:
            value = self._environ.get(ref.env)
        elif value is None and ref.file is not None:
            value = _first_line(Path(ref.file))
        value = value.strip() if value is not None else ""
        return value or None

    def missing(self, refs: Iterable[SecretRef]) -> list[SecretRef]:
        """The references that have no value here, each once, in the given order."""
        return [ref for ref in dict.fromkeys(refs) if self.get(ref) is None]

    def __repr__(self) -> str:
        return f"SecretStore(names={sorted(self._given)!r})"


def _first_line(path: Path) -> str | None:
    try:
        with path.open("rb") as handle:
            line = handle.readline(SECRET_BYTES_MAX)
        return line.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
