"""How the Kubernetes API merges changes into objects, and how its selectors choose. It knows no schemas."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]
_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "imagePullSecrets": ("name",),
    "volumeMounts": ("mountPath",),
    "conditions": ("type",),
    "ports": ("containerPort", "port"),
}
"""Keys by which the elements of a list are the same ones, by the name of the list. Other lists are one value."""


def apply_patch(target: Object, change: Object, last: Object | None = None, *, by_key: bool = True) -> Object:
    """Return an object with a change in it; None removes a key.

    ``by_key``: elements of some lists are merged by a key, else lists are replaced. ``last``: what the same manager has
    applied before; what is not in the change any more is removed.
    """
    result = copy.deepcopy(target)
    for key in set(last or ()) - set(change):
        result.pop(key, None)
    for key, value in change.items():
        if key.startswith("$"):
            continue
        before = (last or {}).get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            inner = result.get(key)
            former = before if isinstance(before, dict) else None
            result[key] = apply_patch(inner if isinstance(inner, dict) else {}, value, former, by_key=by_key)
        elif by_key and isinstance(value, list) and key in _KEYS and isinstance(result.get(key), list):
            former_list = before if isinstance(before, list) else []
            result[key] = _merged(result[key], value, former_list, _KEYS[key])
        else:
            result[key] = copy.deepcopy(value)
    return result


def _merged(target: list[Any], change: list[Any], last: list[Any], keys: tuple[str, ...]) -> list[Any]:
    def identity(each: Object) -> Any:
        return next((each[key] for key in keys if key in each), None)

    found = {identity(each): each for each in target}
    former = {identity(each): each for each in last}
    for each in change:
        name = identity(each)
        if each.get("$patch") == "delete":
            found.pop(name, None)
        else:
            found[name] = apply_patch(found.get(name, {}), each, former.pop(name, None))
    for name in former:
        if name not in {identity(each) for each in change}:
            found.pop(name, None)
    return list(found.values())


def selects(query: Mapping[str, str], found: Object) -> bool:
    """Whether the selectors of a query choose an object."""
    labels = found["metadata"].get("labels") or {}
    fields = {f"metadata.{key}": str(value) for key, value in found["metadata"].items()}
    fields["type"] = str(found.get("type", ""))
    return all(
        _holds(each, values)
        for selector, values in (("labelSelector", labels), ("fieldSelector", fields))
        for each in re.split(r",(?![^()]*\))", query.get(selector, ""))
        if each
    )


def _holds(requirement: str, values: Mapping[str, str]) -> bool:
    if match := re.fullmatch(r"\s*(\S+) (in|notin) \(([^)]*)\)\s*", requirement):
        named = values.get(match[1]) in [each.strip() for each in match[3].split(",")]
        return named == (match[2] == "in")
    if "!=" in requirement:
        key, _, value = requirement.partition("!=")
        return values.get(key) != value
    if "=" in requirement:
        key, _, value = requirement.replace("==", "=").partition("=")
        return values.get(key) == value
    return requirement.removeprefix("!") in values if not requirement.startswith("!") else requirement[1:] not in values
