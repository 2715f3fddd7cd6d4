"""Checkpoints of treelite: what forests of scikit-learn and cuML are exported to."""

from __future__ import annotations

import struct

from nerite.artifacts.artifact import Artifact, Unusable
from nerite.artifacts.candidate import Candidate
from nerite.artifacts.forest import forest

_HEADER = struct.Struct("<iii")
_NEWEST_MINOR = 100
_MOST_TREES = 10_000_000
_TYPES = (2, 3)
"""Numbers of the types float32 and float64."""


def recognise(candidate: Candidate) -> Artifact | None:
    """Return a checkpoint: its head has a version, the types of thresholds and leaves, and the number of trees."""
    named = candidate.suffix == ".tl"
    head = candidate.head
    fits = len(head) > _HEADER.size + 10 and _fits(head)
    if not fits and named:
        remedy = "Write it again: treelite.sklearn.import_model(model).serialize('checkpoint.tl')"
        raise Unusable(candidate.path, "this is no checkpoint of treelite", remedy)
    return forest(candidate, "treelite checkpoint", "checkpoint.tl", "treelite_checkpoint") if fits else None


def _fits(head: bytes) -> bool:
    major, minor, patch = _HEADER.unpack_from(head)
    if not (major in (3, 4, 5) and 0 <= minor < _NEWEST_MINOR and 0 <= patch < _NEWEST_MINOR):
        return False
    threshold, leaf = head[_HEADER.size], head[_HEADER.size + 1]
    (trees,) = struct.unpack_from("<Q", head, _HEADER.size + 2)
    return threshold in _TYPES and leaf in (1, *_TYPES) and 0 < trees < _MOST_TREES
