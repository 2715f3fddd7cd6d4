"""What ``torch.save`` writes: weights, or a whole module as a pickle. Neither is a program: what to make of it."""

from __future__ import annotations

from typing import NoReturn

from nerite.artifacts import pickles
from nerite.artifacts.artifact import Artifact, Unusable
from nerite.artifacts.candidate import Candidate

_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How a file of torch before 1.6 begins."""
_BUILDING_BLOCKS = ("collections.", "torch.", "numpy.", "builtins.", "__builtin__.", "_codecs.")
_MODULES = "torch.nn.modules."
_EXPORT = "torch.export.save(torch.export.export(module.eval(), (example_input,)), 'model.pt2')"


def recognise(candidate: Candidate) -> Artifact | None:
    """Refuse what ``torch.save`` has written."""
    if "data.pkl" in candidate.members and not any(name.startswith("code/") for name in candidate.members):
        _refuse(candidate, pickles.names(candidate.member("data.pkl")))
    if candidate.head.startswith(_OLD):
        _refuse(candidate, pickles.names(candidate.head[len(_OLD) :]))
    return None


def _refuse(candidate: Candidate, names: list[str]) -> NoReturn:
    own = [name for name in names if name.startswith(_MODULES) or not name.startswith(_BUILDING_BLOCKS)]
    if own:
        raise Unusable(
            candidate.path,
            f"this is a pickled module (of the class {own[0]}), which only the program that made it can read",
            f"Load it there, and export a program: {_EXPORT}",
        )
    raise Unusable(
        candidate.path,
        "these are weights (a state_dict), without the module that they belong to",
        f"Load them into their module, and export a program: {_EXPORT}",
    )
