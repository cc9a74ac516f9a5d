"""A bundle's members read into Python values: the manifest, its files, and what the other members must look like.

Checks form only; what the entries claim is for the modules behind it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from engine.verifier.archive import MANIFEST, Archive
from engine.verifier.canonical import parse
from engine.verifier.faults import InvalidError
from engine.verifier.shapes import (
    Shape,
    exactly,
    is_count,
    is_hash,
    is_id,
    is_text,
    is_time,
    list_of,
    one_of,
    optional,
    require,
)

FORMAT: Final = "podium-bundle/1"
PAGE: Final = "index.html"
ARTIFACTS: Final = "artifacts.json"
SYSTEM_ENTRIES: Final = "system/entries.jsonl"
CHECKPOINT, PROOF, HISTORY, KEYS = "log/checkpoint", "log/proof.json", "log/history.json", "log/keys.json"

# Nothing commits to how a text is to be displayed, so there are few words for it, and no letter of them can be another.
MEDIA_TYPES: Final = ("text/plain;charset=utf-8", "application/json", "application/octet-stream")
ROLES: Final = ("task", "text", "plan", "remarks", "manifest", "basis")

_CHAIN = {"entries": is_count, "head": is_hash}
_MANIFEST = exactly(
    {
        "created_at": is_time,
        "export": optional(is_id),
        "files": list_of(exactly({"bytes": is_count, "path": is_text, "sha256": is_hash})),
        "format": is_text,
        "log": optional(exactly({"root": is_hash, "size": is_count})),
        "producer": is_text,
        "runs": list_of(exactly({**_CHAIN, "run": is_id})),
        "system": optional(exactly(_CHAIN)),
        "tenant": is_id,
    }
)
_ARTIFACT = exactly(
    {
        "artifact": is_id,
        "bytes": is_count,
        "commitment": is_hash,
        "kind": is_text,
        "media_type": one_of(*MEDIA_TYPES),
        "ordinal": is_count,
        "owner": is_id,
        "role": one_of(*ROLES),
        "run": is_id,
        "salt": optional(is_hash),
        "state": one_of("disclosed", "redacted", "erased"),
    }
)


@dataclass(slots=True)
class ListedArtifact:
    """A row of ``artifacts.json``. ``salt`` is given exactly if the artifact is disclosed."""

    id: str
    size: int
    commitment: str
    kind: str
    ordinal: int
    owner: str
    run: str
    salt: str | None
    state: str


@dataclass(frozen=True, slots=True)
class ChainHead:
    """What the manifest says of a chain: how many entries, and the hash of the last one."""

    chain: str
    member: str
    entries: int
    head: str


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle whose members are those of its manifest."""

    archive: Archive
    tenant: str
    created_at: str
    producer: str
    export: str | None
    runs: tuple[ChainHead, ...]
    system: ChainHead | None
    log: Mapping[str, Any] | None
    artifacts: Mapping[str, ListedArtifact]
    pools: Mapping[str, bytes]

    @property
    def chains(self) -> tuple[ChainHead, ...]:
        """The runs' chains, then the tenant's own."""
        return self.runs if self.system is None else (*self.runs, self.system)


def read_json(archive: Archive, name: str, shape: Shape) -> Any:
    """A member as JSON of a shape; raises InvalidError."""
    try:
        value = parse(archive.read(name))
    except InvalidError as error:
        raise InvalidError(f"{name} {error}") from None
    return require(value, shape, f"{name} does not have the fields that it must have")


def read_bundle(archive: Archive) -> Bundle:
    """Reads the manifest, compares every member with it, and reads the lists. Raises InvalidError."""
    manifest = _manifest(archive)
    tenant = manifest["tenant"]
    runs = tuple(
        ChainHead(run["run"], f"runs/{run['run']}/entries.jsonl", run["entries"], run["head"])
        for run in manifest["runs"]
    )
    ids = [run.chain for run in runs]
    if ids != sorted(set(ids)) or tenant in ids:
        raise InvalidError("the manifest does not list each run once, in order")
    system = manifest["system"]
    head = None if system is None else ChainHead(tenant, SYSTEM_ENTRIES, system["entries"], system["head"])
    if not runs and head is None:
        raise InvalidError("the bundle holds no entries")
    artifacts = _artifacts(archive)
    pools = _pools(archive)
    bundle = Bundle(
        archive=archive,
        tenant=tenant,
        created_at=manifest["created_at"],
        producer=manifest["producer"],
        export=manifest["export"],
        runs=runs,
        system=head,
        log=manifest["log"],
        artifacts=artifacts,
        pools=pools,
    )
    _check_members(bundle)
    return bundle


def _manifest(archive: Archive) -> Any:
    if archive.names[0] != MANIFEST:
        raise InvalidError("the bundle has no manifest")
    try:
        manifest = parse(archive.read(MANIFEST))
    except InvalidError as error:
        raise InvalidError(f"{MANIFEST} {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InvalidError(f"the bundle's format is not {FORMAT}, the only one that this verifier knows")
    require(manifest, _MANIFEST, f"{MANIFEST} does not have the fields that it must have")
    listed = {file["path"]: file for file in manifest["files"]}
    if [file["path"] for file in manifest["files"]] != archive.names[1:] or len(listed) != len(manifest["files"]):
        raise InvalidError("the manifest does not list the members of the bundle")
    for name, file in listed.items():
        if archive.size(name) != file["bytes"]:
            raise InvalidError(f"{name} does not have the size that the manifest says")
        if hashlib.sha256(archive.read(name)).hexdigest() != file["sha256"]:
            raise InvalidError(f"{name} is not the file that the manifest says")
    return manifest


def _artifacts(archive: Archive) -> dict[str, ListedArtifact]:
    document = read_json(archive, ARTIFACTS, exactly({"artifacts": list_of(_ARTIFACT)}))
    rows = [
        ListedArtifact(
            row["artifact"],
            row["bytes"],
            row["commitment"],
            row["kind"],
            row["ordinal"],
            row["owner"],
            row["run"],
            row["salt"],
            row["state"],
        )
        for row in document["artifacts"]
    ]
    ids = [row.id for row in rows]
    if ids != sorted(set(ids)):
        raise InvalidError(f"{ARTIFACTS} does not list each artifact once, in order")
    for row in rows:
        if (row.salt is None) == (row.state == "disclosed"):
            raise InvalidError(f"{ARTIFACTS} gives a salt for what is not disclosed, or none for what is")
    return {row.id: row for row in rows}


def _pools(archive: Archive) -> dict[str, bytes]:
    pools = {}
    for name in archive.names:
        if name.startswith("pools/"):
            digest = name.removeprefix("pools/").removesuffix(".json")
            pools[digest] = archive.read(name)
            if name != f"pools/{digest}.json" or hashlib.sha256(pools[digest]).hexdigest() != digest:
                raise InvalidError(f"{name} is not the pool document that its name says")
    return pools


def _check_members(bundle: Bundle) -> None:
    """Every member has a meaning, and every member that must be there is there."""
    needed = {MANIFEST, PAGE, ARTIFACTS, *(chain.member for chain in bundle.chains)}
    needed.update(f"pools/{digest}.json" for digest in bundle.pools)
    needed.update(f"artifacts/{row.id}" for row in bundle.artifacts.values() if row.state == "disclosed")
    if bundle.log is not None:
        needed.update((CHECKPOINT, PROOF, HISTORY, KEYS))
    _compare("the bundle lacks", needed, bundle.archive.names)
    _compare("the bundle holds what does not belong there:", bundle.archive.names, needed)


def _compare(words: str, wanted: Iterable[str], present: Iterable[str]) -> None:
    missing = sorted(set(wanted) - set(present))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InvalidError(f"{words} {missing[0]}{more}")
