"""History: what others need to merge a round again: the versions that it was based on, what its updates weighed, and
the versions that it gave. It only reads.
Next: ../../verify_invite.py, which merges again from outside."""

from __future__ import annotations

from typing import Any

from blocktrain.errors import BlobError
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import Version

PAGE_ROUNDS = 50


class History:
    def __init__(self, ledger: Ledger, blobs: Blobs) -> None:
        self._ledger, self._blobs = ledger, blobs

    def merges(self, phase: int, first: int) -> list[dict[str, Any]]:
        """The merged rounds of a phase from this one on, in order."""
        found = []
        for round, versions in self._ledger.versions_by_round(phase, first, PAGE_ROUNDS).items():
            base = (self._ledger.version(*key) for key in self._ledger.base_of(phase, round).items())
            found.append(
                {
                    "phase": phase,
                    "round": round,
                    "base": [self._told(version) for version in base if version],
                    "versions": [self._told(version) for version in versions],
                    "weights": [vars(weight) for weight in self._ledger.merge_weights(phase, round)],
                }
            )
        return found

    def _told(self, version: Version) -> dict[str, Any]:
        return {
            "block": version.block,
            "version": version.version,
            "sha256": version.sha256,
            "num_bytes": self._size(version.sha256),
            "momentum_sha256": version.momentum_sha256,
            "momentum_bytes": self._size(version.momentum_sha256),
            "difference_sha256": version.difference_sha256,
        }

    def _size(self, sha256: str | None) -> int | None:
        """None if the blob is no longer kept."""
        try:
            return self._blobs.size(sha256) if sha256 else None
        except BlobError:
            return None
