"""Which tensor of a program a name in the configuration means. Pure.

A program's own names come first, then ``<any name>__<position>``. Where a name is neither, the order in the
configuration decides for all of them, as in Triton; but not against names that the program knows, which Triton would
swap silently.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from nerite.backends.configuration import all_inputs, all_outputs
from nerite.backends.pytorch.program import Slot
from nerite.core.errors import InvalidArgument

_log = logging.getLogger("nerite.backends.pytorch")

_POSITION: Final = re.compile(r".*__(\d+)", re.DOTALL)


def given(config: Mapping[str, Any]) -> list[str]:
    """Return the names of all that a model is given: inputs, controls, states, and what is made for a batch."""
    names = [str(entry["name"]) for entry in all_inputs(config)]
    return names + [str(target) for made in config.get("batch_input", ()) for target in made["target_name"]]


def taken(config: Mapping[str, Any]) -> list[str]:
    """Return the names of all that a model gives: outputs and states."""
    return [str(entry["name"]) for entry in all_outputs(config)]


def inputs(model: str, names: Sequence[str], slots: Sequence[Slot]) -> dict[str, Slot]:
    """Return the slot of each name, in the order of ``slots``.

    Raises ``InvalidArgument`` for a name that there is not, and where one is lacking.
    """
    found = _found(model, names, slots, "input")
    used = set(found.values())
    lacking = [slot.name for at, slot in enumerate(slots) if at not in used and not slot.optional]
    if lacking:
        raise InvalidArgument(
            f"unable to load model '{model}', configuration expects {len(names)} inputs, model provides {len(slots)}. "
            f"The configuration lacks: {', '.join(lacking)}"
        )
    return {name: slots[at] for name, at in sorted(found.items(), key=lambda item: item[1])}


def outputs(model: str, names: Sequence[str], slots: Sequence[Slot]) -> dict[str, Slot]:
    """Return the slot of each name. Raises ``InvalidArgument`` for one that there is not."""
    return {name: slots[at] for name, at in _found(model, names, slots, "output").items()}


def _found(model: str, names: Sequence[str], slots: Sequence[Slot], side: str) -> dict[str, int]:
    known = {alias: at for at, slot in reversed(list(enumerate(slots))) for alias in (*slot.aliases, slot.name)}
    found = {name: at for name in names if (at := _position(name, known)) is not None}
    for name, at in found.items():
        if at >= len(slots):
            raise InvalidArgument(
                f"The {side} {name} in the model configuration refers to an {side} index which doesn't exist. This "
                f"model has {len(slots)} {side}s: {_listed(slots)}"
            )
    strange = [name for name in names if name not in found]
    if strange:
        if len(names) > len(slots) or any(found.get(name, at) != at for at, name in enumerate(names)):
            raise InvalidArgument(
                f"unexpected inference {side} '{strange[0]}', allowed {side}s are: {_listed(slots)}, or "
                f"{side.upper()}__0 and so on"
            )
        _log.warning(
            "%s '%s' or previous %s(s) of the model '%s' are neither among its names nor do they follow the "
            "<name>__<index> naming convention. Falling back to enforcing strict ordering from model configuration.",
            side,
            strange[0],
            side,
            model,
        )
        return {name: at for at, name in enumerate(names)}
    first: dict[int, str] = {}
    for name, at in found.items():
        if (other := first.setdefault(at, name)) != name:
            raise InvalidArgument(f"model '{model}': {side}s '{other}' and '{name}' are the same: '{slots[at].name}'")
    return found


def _position(name: str, known: Mapping[str, int]) -> int | None:
    if name in known:
        return known[name]
    matched = _POSITION.fullmatch(name)
    return int(matched[1]) if matched else None


def _listed(slots: Sequence[Slot]) -> str:
    return ", ".join(slot.name for slot in slots)
