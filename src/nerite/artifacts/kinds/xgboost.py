"""XGBoost, in its three formats: JSON, universal binary JSON, and the binary one of before 3.1."""

from __future__ import annotations

import re

from nerite.artifacts.artifact import Artifact, Unusable
from nerite.artifacts.candidate import Candidate, cut_off
from nerite.artifacts.forest import forest

_BINARY = re.compile(rb"\{(?:[iU].|I..|l.{4}|L.{8})(?:learner|version)", re.DOTALL)
_JSON = re.compile(rb'\{\s*"(?:learner|version)"')
_DUMP = re.compile(rb'booster\[0\]:|\s*(?:\[\s*)?\{\s*"nodeid"')
_LEGACY_MAGIC = b"binf"
_LEGACY_NUMBERS = 136
_LONGEST_NAME = 64
_BOOSTERS = (b"gbtree", b"dart", b"gblinear")
_SAVE = "Save it with booster.save_model('model.ubj')"


def recognise(candidate: Candidate) -> Artifact | None:
    """Return a booster that ``save_model`` has written."""
    head = candidate.head
    if _DUMP.match(head):
        raise Unusable(candidate.path, "this is a dump of XGBoost's trees for people to read", f"{_SAVE}.")
    if _JSON.match(head) and b'"generic_param"' in head:
        raise Unusable(candidate.path, "these are a booster's settings (save_config), without its trees", f"{_SAVE}.")
    if _JSON.match(head) and b'"learner"' in head:
        if b'"gradient_booster"' not in head + candidate.tail:
            return None
        _check_end(candidate)
        return forest(candidate, "XGBoost model", "xgboost.json", "xgboost_json")
    if _BINARY.match(head) and b"learner" in head:
        _check_end(candidate)
        return forest(candidate, "XGBoost model", "xgboost.ubj", "xgboost_ubj")
    if _is_legacy(head):
        return forest(candidate, "XGBoost model", "xgboost.model", "xgboost")
    return None


def _is_legacy(head: bytes) -> bool:
    """Say whether numbers of a fixed size are followed by the names of an objective and of a booster."""
    at = _LEGACY_NUMBERS + (len(_LEGACY_MAGIC) if head.startswith(_LEGACY_MAGIC) else 0)
    names = []
    for _ in range(2):
        size = int.from_bytes(head[at : at + 8], "little")
        names.append(head[at + 8 : at + 8 + size])
        at += 8 + size
        if not 0 < size <= _LONGEST_NAME:
            return False
    return names[1] in _BOOSTERS


def _check_end(candidate: Candidate) -> None:
    if not candidate.tail.rstrip().endswith(b"}"):
        raise cut_off(candidate.path, "it does not end with the brace that its first one needs")
