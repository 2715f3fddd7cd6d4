"""LightGBM, in its text format."""

from __future__ import annotations

from nerite.artifacts.artifact import Artifact
from nerite.artifacts.candidate import Candidate, cut_off
from nerite.artifacts.forest import forest


def recognise(candidate: Candidate) -> Artifact | None:
    """Return a booster that ``save_model`` has written."""
    if not candidate.head.replace(b"\r\n", b"\n").startswith((b"tree\nversion=", b"tree\nnum_class=")):
        return None
    # Behind the trees stand importances and parameters, of any length.
    if b"end of trees" not in candidate.head and b"end of trees" not in candidate.path.read_bytes():
        raise cut_off(candidate.path, "the line 'end of trees' is missing")
    return forest(candidate, "LightGBM model", "model.txt", "lightgbm")
