"""Reads and writes routes as text: ``route.toml`` in the directory of a model or of a name, and JSON of the API."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from nerite.config.sticky_key import StickyKey
from nerite.core.client_text import checked_name
from nerite.core.errors import InvalidArgument
from nerite.core.text import quoted_text
from nerite.scheduling.weighted_route import MAX_ARMS, RouteArm, RouteShadow, WeightedRoute

FILE: Final = "route.toml"
SHADOW_RESULTS: Final = "shadow_results"
"""Key of a route's JSON form for what its shadow has shown; has no effect in a request."""
_LARGEST: Final = 64 * 1024
_TOP: Final = ("arm", "sticky", "salt", "shadow")
_ARM: Final = ("model", "version", "weight")
_SHADOW: Final = ("model", "version", "share", "tolerance", "timeout", "concurrency", "samples", "contents")
_Path = tuple[str | int, ...]
_Place = Callable[[_Path], str]


class RouteFile(NamedTuple):
    """A route that was read from a file, and where its arms are in it."""

    route: WeightedRoute
    places: Sequence[str]
    """For each of its targets, file and line."""


def read_route_file(directory: Path) -> RouteFile | None:
    """Return the route in a model's directory; None if it has none.

    Raises ``InvalidArgument`` for a mistake, with file and line; and ``OSError`` for a file that cannot be read.
    """
    file = directory / FILE
    try:
        with file.open("rb") as opened:
            raw = opened.read(_LARGEST + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(raw) > _LARGEST:
        raise InvalidArgument(f"{file}: more than {_LARGEST} bytes are not a route")
    return parse_route_file(raw, str(file), directory.name)


def is_route_alone(directory: Path) -> bool:
    """Return whether a directory with a route has no model: neither a configuration nor a version."""
    return not (directory / "config.pbtxt").exists() and not any(
        child.is_dir() and child.name.isdecimal() for child in directory.iterdir()
    )


def versions_of(route: RouteFile, model: str, existing: Sequence[int]) -> set[int]:
    """Return the versions of ``model`` that are arms of its route. Raises ``InvalidArgument`` for missing ones."""
    versions = set()
    for arm, place in zip(route.route.targets, route.places, strict=True):
        if arm.model == model:
            versions.add(version := int(arm.version))
            if version not in existing:
                there = ", ".join(map(str, existing)) or "none"
                raise InvalidArgument(f"{place}: there is no version {version}; there are: {there}")
    return versions


def parse_route_file(raw: bytes, file: str, name: str) -> RouteFile:
    """Return the route ``name`` in the content of a file. Raises ``InvalidArgument`` with file and line."""
    try:
        text = raw.decode()
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # invalid TOML or UTF-8, overlong integers, deep nesting
        raise InvalidArgument(f"{file}: {error}") from None
    lines = text.splitlines()

    def place(path: _Path) -> str:
        line = _line(lines, path)
        return f"{file}:{line}" if line else file

    route = _route(table, name, place)
    places = [place(("arm", index)) for index in range(len(route.arms))]
    return RouteFile(route, places if route.shadow is None else [*places, place(("shadow",))])


def route_from_json(value: Any, name: str) -> WeightedRoute:
    """Return the route ``name`` in a JSON document of the form of ``route_to_json``. Raises ``InvalidArgument``."""
    if not isinstance(value, dict):
        raise InvalidArgument('a route is an object, as in {"arm": [{"version": 1, "weight": 90}, …]}')
    shadow = value.get("shadow")
    if isinstance(shadow, dict) and shadow.get("samples"):
        raise InvalidArgument(
            f"route '{name}': only {FILE} in the repository may name a file for samples. Leave samples out"
        )
    given = {key: each for key, each in value.items() if key not in ("name", SHADOW_RESULTS)}
    return _route(given, name, lambda path: f"route '{name}'")


def route_to_json(route: WeightedRoute) -> dict[str, Any]:
    """Return the JSON form of a route, whose keys are those of the file."""
    document: dict[str, Any] = {
        "name": route.name,
        "arm": [{"model": arm.model, "version": arm.version, "weight": arm.weight} for arm in route.arms],
        "sticky": [str(key) for key in route.sticky],
        "salt": route.salt,
    }
    if (shadow := route.shadow) is not None:
        values = {**shadow._asdict(), "share": f"{shadow.share:.10%}".rstrip("0%").rstrip(".") + "%"}
        document["shadow"] = {"model": shadow.arm.model, "version": shadow.arm.version} | {
            key: values[key] for key in _SHADOW if key in values and (key != "samples" or shadow.samples)
        }
    return document


def _route(table: Mapping[str, Any], name: str, place: _Place) -> WeightedRoute:
    def wrong(path: _Path, what: str) -> InvalidArgument:
        return InvalidArgument(f"{place(path)}: {what}")

    for key in table:
        if key not in _TOP:
            raise wrong((key,), f"'{quoted_text(key)}' is not known. A route has: {', '.join(_TOP)}")
    arms = table.get("arm")
    if not isinstance(arms, list) or not arms or not all(isinstance(arm, dict) for arm in arms):
        raise wrong(("arm",), "a route needs arms: write [[arm]] and below it model or version, and weight, for each")
    if len(arms) > MAX_ARMS:
        raise wrong(("arm",), f"a route has at most {MAX_ARMS} arms, this one has {len(arms)}")
    sticky = table.get("sticky", [])
    if isinstance(sticky, str):
        sticky = [sticky]
    if not isinstance(sticky, list) or not all(isinstance(key, str) for key in sticky):
        raise wrong(("sticky",), 'sticky must be a list of keys, as in ["header:x-user", "tenant"]')
    salt = table.get("salt", "")
    if not isinstance(salt, str):
        raise wrong(("salt",), "salt must be text")
    read = tuple(_arm(arm, index, name, wrong) for index, arm in enumerate(arms))
    shadow = _shadow(table["shadow"], name, wrong) if "shadow" in table else None
    try:
        keys = tuple(StickyKey.parse(checked_name(key, "a sticky key")) for key in sticky)
    except InvalidArgument as error:
        raise wrong(("sticky",), error.message) from None
    try:
        route = WeightedRoute(name, read, keys, checked_name(salt, "the salt"))
    except InvalidArgument as error:
        raise wrong(("arm",), error.message) from None
    try:
        return replace(route, shadow=shadow)
    except InvalidArgument as error:
        raise wrong(("shadow",), error.message) from None


def _shadow(table: Any, name: str, wrong: Callable[[_Path, str], InvalidArgument]) -> RouteShadow:
    if not isinstance(table, dict):
        raise wrong(("shadow",), 'shadow must be a table, as in [shadow] version = 2, share = "10%"')
    for key, kinds, what in (
        ("tolerance", (int, float), "a number: the relative distance up to which answers are close"),
        ("timeout", (int, float), "a number of seconds"),
        ("concurrency", (int,), "a number of requests"),
        ("samples", (str,), "the absolute path of a file"),
        ("contents", (bool,), "true or false"),
    ):
        value = table.get(key)
        if key in table and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise wrong(("shadow", key), f"{key} must be {what}")
    try:
        samples = checked_name(table.get("samples", ""), "the path of the samples")
    except InvalidArgument as error:
        raise wrong(("shadow", "samples"), error.message) from None
    if samples and not Path(samples).is_absolute():
        raise wrong(("shadow", "samples"), "samples must be the absolute path of a file")
    if table.get("contents") and not samples:
        raise wrong(("shadow", "contents"), "contents has no effect without samples: name a file for them")
    arm = {key: table[key] for key in ("model", "version") if key in table}
    unknown = next((key for key in table if key not in _SHADOW), None)
    if unknown is not None:
        raise wrong(("shadow", unknown), f"'{quoted_text(unknown)}' is not known. A shadow has: {', '.join(_SHADOW)}")
    optional = {key: table[key] for key in ("tolerance", "timeout", "concurrency", "contents") if key in table}

    def misplaced(path: _Path, what: str) -> InvalidArgument:
        return wrong(("shadow", path[-1]), what)

    try:
        share = parse_share(table.get("share"))
    except InvalidArgument as error:
        raise wrong(("shadow", "share"), error.message) from None
    return RouteShadow(_arm({**arm, "weight": 0}, 0, name, misplaced), share, samples=samples, **optional)


def parse_share(text: object) -> float:
    """Return the share that a text such as ``10%`` describes. Raises ``InvalidArgument``."""
    try:
        if isinstance(text, str) and text.endswith("%") and 0 < (percent := float(text[:-1])) <= 100:
            return percent / 100
    except ValueError:
        pass
    raise InvalidArgument('share must be text such as "10%", more than 0 % and at most 100 % of the requests')


def _arm(arm: Mapping[str, Any], index: int, name: str, wrong: Callable[[_Path, str], InvalidArgument]) -> RouteArm:
    for key in arm:
        if key not in _ARM:
            raise wrong(("arm", index, key), f"'{quoted_text(key)}' is not known. An arm has: {', '.join(_ARM)}")
    model, version, weight = arm.get("model", name), arm.get("version", ""), arm.get("weight")
    if not isinstance(model, str) or not model:
        raise wrong(("arm", index, "model"), "model must be the name of a model")
    if isinstance(version, bool) or not isinstance(version, int | str) or (isinstance(version, int) and version < 1):
        raise wrong(("arm", index, "version"), "version must be a version number, 1 or more")
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise wrong(("arm", index, "weight"), "weight must be a number: the arm gets this share of the sum of weights")
    try:
        checked_name(model, "the model of an arm")
        return RouteArm(model, checked_name(str(version), "the version of an arm"), float(weight))
    except OverflowError:
        raise wrong(("arm", index, "weight"), "weight is too large") from None
    except InvalidArgument as error:
        raise wrong(("arm", index, "model"), error.message) from None


def _line(lines: Sequence[str], path: _Path) -> int:
    """Return the line of a key, or of the arm that it is missing in; 0 if there is neither."""
    index, arm = -1, -1
    if path[0] == "shadow":
        return _shadow_line(lines, path)
    for number, line in enumerate(lines, 1):
        if re.match(r"\s*\[\[\s*arm\s*\]\]", line):
            index += 1
            if path[:2] == ("arm", index) or path == ("arm",):
                arm = number
                if len(path) <= 2:
                    return number
        elif (len(path) == 1 and index < 0) or (len(path) == 3 and path[1] == index):
            match = re.match(r"\s*[\"']?([^\"'=#\s]+)[\"']?\s*=", line)
            if match is not None and match[1] == path[-1]:
                return number
    return max(arm, 0)


def _shadow_line(lines: Sequence[str], path: _Path) -> int:
    """Return the line of a key of the shadow, or of its table; 0 if there is neither."""
    table = 0
    for number, line in enumerate(lines, 1):
        if re.match(r"\s*\[\s*shadow\s*\]", line) or (not table and re.match(r"\s*shadow\b", line)):
            table = number
        elif re.match(r"\s*\[", line):
            table = -table
        elif table > 0 and len(path) == 2 and re.match(rf"\s*{re.escape(str(path[1]))}\s*=", line):
            return number
    return abs(table)
