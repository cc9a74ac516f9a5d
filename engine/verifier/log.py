"""Where the entries stand in the tenant's log: the tree's root, the signed checkpoints, and the auditor's own one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from engine.verifier.bundle import CHECKPOINT, HISTORY, KEYS, PROOF, Bundle, read_json
from engine.verifier.canonical import hex_bytes
from engine.verifier.chains import Entry
from engine.verifier.checkpoint import Checkpoint, SignedCheckpoint, open_checkpoint, origin_of
from engine.verifier.faults import Findings, InvalidError
from engine.verifier.merkle import HASH_BYTES, combined_root, root_of, verify_consistency
from engine.verifier.note import NoteError, UntrustedError, Verifier
from engine.verifier.rotation import KeyHistory, Rotation, key_history, parse_rotation
from engine.verifier.shapes import Shape, exactly, is_count, is_hash, is_id, list_of

_NOTE_MAX = 64 * 1024
_NO_CHECKPOINT = "no signed checkpoint: anybody can have written this bundle"
_UNSIGNED = "no signed checkpoint covers any entry of its runs: anybody can have written this bundle"
_OTHER_KEY = (
    "to trust a key of an earlier or later time as well, get it from the operator (never from the bundle) and add it "
    "to the trust file: one key a line; several --trust add up"
)


_IS_NOTE = Shape(str, lambda value: len(value) <= _NOTE_MAX)
_COUNTS = list_of(is_count)
_IS_LEAVES = Shape(dict, lambda values: all(map(is_id, values)) and all(map(_COUNTS, values.values())))
_PROOF = exactly({"leaves": _IS_LEAVES, "nodes": list_of(is_hash), "root": is_hash, "size": is_count})
_HISTORY = exactly({"checkpoints": list_of(exactly({"consistency": list_of(is_hash), "note": _IS_NOTE}))})
_KEYS = exactly({"rotations": list_of(exactly({"note": _IS_NOTE}))})


@dataclass(slots=True)
class Log:
    """What is proven about the log. ``indexes`` says where the entries of each chain stand, from its first one on.

    ``checkpoints`` holds the signed checkpoints by their sizes, the bundle's own included; ``complete`` says that the
    bundle has all leaves of the log up to that size.
    """

    checkpoint: Checkpoint | None = None
    signer: Verifier | None = None
    indexes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    complete: bool = False
    rotations: tuple[Rotation, ...] = ()
    saved: Checkpoint | None = None

    def index(self, entry: Entry) -> int | None:
        """Where an entry stands in the log; None if it was not in it when the checkpoint was signed."""
        known = self.indexes.get(entry.chain, ())
        return known[entry.seq - 1] if entry.seq <= len(known) else None


def verify_log(
    bundle: Bundle,
    chains: Mapping[str, Sequence[Entry]],
    trust: Sequence[Verifier],
    saved: bytes | None,
    findings: Findings,
) -> Log:
    """Checks root, signatures, earlier checkpoints and the saved one; records faults."""
    log = Log()
    findings.unanchored = sum(map(len, chains.values()))
    if bundle.log is None:
        if saved is not None:
            findings.fault("log", "the bundle has no checkpoint that could be compared with the saved one")
        return log
    try:
        history = _keys(bundle, trust)
        log.rotations = history.rotations
        signed = _open(bundle.archive.read(CHECKPOINT), history, bundle, CHECKPOINT)
        log.checkpoint, log.signer = signed.checkpoint, history.signer(signed.signers, signed.checkpoint.size)
        log.checkpoints[signed.checkpoint.size] = signed.checkpoint
        leaves = _leaves(bundle, chains, log)
        _read_history(bundle, history, log)
        if saved is not None:
            _compare_saved(saved, history, bundle, log, leaves)
    except UntrustedError as error:
        findings.fault("log", str(error))
        findings.hint(_OTHER_KEY)
        return log
    except (InvalidError, NoteError) as error:
        findings.fault("log", str(error))
        return log
    findings.unanchored -= len(leaves)
    return log


def verify_signed(bundle: Bundle, log: Log | None, findings: Findings) -> None:
    """A bundle of whose runs nothing is under a signed checkpoint is nobody's word, though all of it fits together.

    A genuine checkpoint that is put beside it, or the tenant's own chain, which is the same in every bundle, changes
    nothing. Records a fault, or the runs of which no entry is covered.
    """
    known = {} if log is None else log.indexes
    heads = bundle.runs or bundle.chains
    findings.unsigned = [head.chain for head in heads if not known.get(head.chain)]
    if len(findings.unsigned) == len(heads) and not findings.faults:
        findings.fault("log", _NO_CHECKPOINT if bundle.log is None else _UNSIGNED)
        findings.hint("export it again once the log is signed (`podium audit checkpoint`)")


def _keys(bundle: Bundle, trust: Sequence[Verifier]) -> KeyHistory:
    rows = read_json(bundle.archive, KEYS, _KEYS)["rotations"]
    try:
        rotations = [parse_rotation(row["note"].encode()) for row in rows]
        return key_history(trust, rotations, origin_of(bundle.tenant))
    except (NoteError, UnicodeEncodeError) as error:
        raise InvalidError(f"{KEYS}: {error}") from None


def _open(data: bytes, history: KeyHistory, bundle: Bundle, what: str) -> SignedCheckpoint:
    try:
        signed = open_checkpoint(data, history.keys(), origin=origin_of(bundle.tenant))
    except UntrustedError as error:
        raise UntrustedError(f"{what}: {error}") from None
    except NoteError as error:
        raise InvalidError(f"{what}: {error}") from None
    if history.signer(signed.signers, signed.checkpoint.size) is None:
        raise InvalidError(f"{what}: the key that signed it was not in service at that size")
    return signed


def _leaves(bundle: Bundle, chains: Mapping[str, Sequence[Entry]], log: Log) -> dict[int, bytes]:
    """The leaves of the bundle by their places, once the root that they give is the signed one."""
    proof = read_json(bundle.archive, PROOF, _PROOF)
    checkpoint = log.checkpoint
    if checkpoint is None or bundle.log is None:
        raise InvalidError("there is no checkpoint")
    stated = (checkpoint.size, checkpoint.root.hex())
    if (proof["size"], proof["root"]) != stated or (bundle.log["size"], bundle.log["root"]) != stated:
        raise InvalidError("manifest, proof and checkpoint do not speak of the same tree")
    leaves: dict[int, bytes] = {}
    count = 0
    for chain, indexes in proof["leaves"].items():
        entries = chains.get(chain)
        if entries is None or len(indexes) > len(entries):
            raise InvalidError(f"{PROOF} speaks of entries that the bundle does not have")
        if any(before >= after for before, after in pairwise(indexes)):
            raise InvalidError(f"the entries of chain {chain} do not stand in the log in their order")
        leaves.update(zip(indexes, (entry.leaf for entry in entries), strict=False))
        count += len(indexes)
    if set(proof["leaves"]) != set(chains):
        raise InvalidError(f"{PROOF} does not speak of every chain")
    if len(leaves) != count:
        raise InvalidError("two entries claim the same place in the log")
    nodes = [bytes.fromhex(node) for node in proof["nodes"]]
    if count and combined_root(leaves, checkpoint.size, nodes) != checkpoint.root:
        raise InvalidError("the entries do not lead to the root that was signed: some were changed, removed or added")
    if not count and nodes:
        raise InvalidError("there are nodes without leaves")
    log.indexes = proof["leaves"]
    log.complete = count == checkpoint.size
    return leaves


def _read_history(bundle: Bundle, history: KeyHistory, log: Log) -> None:
    """Earlier checkpoints, each consistent with the bundle's own."""
    current = log.checkpoint
    if current is None:
        return
    before = -1
    for row in read_json(bundle.archive, HISTORY, _HISTORY)["checkpoints"]:
        try:
            note = row["note"].encode()
        except UnicodeEncodeError:
            raise InvalidError(f"{HISTORY} holds what is no text") from None
        earlier = _open(note, history, bundle, HISTORY).checkpoint
        if not before < earlier.size < current.size:
            raise InvalidError(f"{HISTORY} does not list smaller checkpoints in the order of their sizes")
        before = earlier.size
        path = [hex_bytes(node, HASH_BYTES) or b"" for node in row["consistency"]]
        if not verify_consistency(earlier.size, earlier.root, current.size, current.root, path):
            raise InvalidError(f"the log is not an extension of its own checkpoint of size {earlier.size}")
        log.checkpoints[earlier.size] = earlier


def _compare_saved(saved: bytes, history: KeyHistory, bundle: Bundle, log: Log, leaves: Mapping[int, bytes]) -> None:
    """The auditor's own checkpoint: the log must be an extension of it."""
    kept = _open(saved, history, bundle, "the saved checkpoint").checkpoint
    current = log.checkpoint
    if current is None:
        return
    if kept.size > current.size:
        raise InvalidError(
            f"the bundle's checkpoint has size {current.size} and the saved one {kept.size}: "
            "the bundle is older, or entries were removed from the log"
        )
    known = log.checkpoints.get(kept.size)
    if known is None and (log.complete or kept.size == 0):
        ordered = [leaves[index] for index in range(kept.size)]
        known = Checkpoint(kept.origin, kept.size, root_of(ordered))
    if known is None:
        raise InvalidError(
            f"the bundle has no consistency proof from size {kept.size}, that of the saved checkpoint; "
            "ask for an export made with --since and that checkpoint"
        )
    if known.root != kept.root:
        raise InvalidError(f"the log had another content at size {kept.size}: it contradicts the saved checkpoint")
    log.saved = kept
