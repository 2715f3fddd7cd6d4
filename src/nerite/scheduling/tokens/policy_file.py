"""The policy file, as text, to typed data. Every mistake has its line, its key and what to write instead."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from nerite.config.near import nearest
from nerite.core.errors import InvalidArgument
from nerite.scheduling.tokens.policy import (
    ANY_MODEL,
    EVERYBODY,
    KeepLimits,
    ModelLimits,
    Policy,
    PriorityClass,
    Rate,
    Tenant,
    digest_of,
)

Table: TypeAlias = dict[str, Any]
Path: TypeAlias = tuple[str, ...]


class _Kind(NamedTuple):
    """What a value may be."""

    words: str
    fits: Callable[[Any], bool]


def _whole(value: object) -> bool:
    # As TOML has them: one of more digits would fail where it is multiplied with a fraction.
    return isinstance(value, int) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def _number(value: object) -> bool:
    return _whole(value) or (isinstance(value, float) and abs(value) <= _LARGEST)


_LARGEST: Final = 2**63 - 1


_COUNT: Final = _Kind("a whole number from 0 on", lambda value: _whole(value) and value >= 0)
_WEIGHT: Final = _Kind("a whole number from 1 on", lambda value: _whole(value) and value >= 1)
_ORDER: Final = _Kind("a whole number", _whole)
_SECONDS: Final = _Kind("a number of seconds from 0 on", lambda value: _number(value) and value >= 0)
_PART: Final = _Kind("a number from 0 to 1", lambda value: _number(value) and 0 <= value <= 1)
_TEXT: Final = _Kind("a text", lambda value: isinstance(value, str) and value != "")
_TEXTS: Final = _Kind(
    "a list of texts",
    lambda value: isinstance(value, list) and all(isinstance(each, str) and each for each in value),
)

_CLASS: Final = {"order": _ORDER, "share": _WEIGHT, "ttft_seconds": _SECONDS}
_RATES: Final = ("input_tokens", "output_tokens", "requests", "bytes")
_TENANT: Final = {
    "class": _TEXT,
    "weight": _WEIGHT,
    **{f"{rate}_{what}": _COUNT for rate in _RATES for what in ("per_minute", "burst")},
    "concurrency": _COUNT,
    "retry_fraction": _PART,
}
_NAMED_TENANT: Final = {"keys": _TEXTS, "header_values": _TEXTS, **_TENANT}
_LLM: Final = {
    "max_input_tokens": ("max_input", _COUNT),
    "max_output_tokens": ("max_output", _COUNT),
    "context_window": ("context_window", _COUNT),
    "max_sequences": ("max_running", _COUNT),
    "queue_length": ("queue_length", _COUNT),
    "queue_tokens": ("queue_size", _COUNT),
    "overcommit": ("overcommit", _PART),
}
_OTHER: Final = {
    "max_bytes": ("max_input", _COUNT),
    "max_requests": ("max_running", _COUNT),
    "queue_length": ("queue_length", _COUNT),
    "queue_bytes": ("queue_size", _COUNT),
}
_KEYED: Final = "idempotency"
_KEEPING: Final = {"grace_seconds": _SECONDS, "max_answers": _COUNT, "max_bytes": _COUNT}
_TOP: Final = ("header", "classes", "tenants", EVERYBODY, "llms", "models", _KEYED)
_DIGEST: Final = re.compile("[0-9a-f]{64}")
_HEADER: Final = re.compile("[A-Za-z0-9-]+")


def parse(text: str, file: str = "policy") -> Policy:
    """Return the policy that a file says. Raises ``InvalidArgument`` with all mistakes, one a line."""
    try:
        whole = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOML that is wrong, digits without end, brackets without end
        raise InvalidArgument(f"{file}: {error}") from None
    reader = _Reader(text, file)
    policy = reader.policy(whole)
    if reader.mistakes:
        raise InvalidArgument("\n".join(reader.mistakes))
    return policy


class _Reader:
    """Goes through the tables and gathers the mistakes; what is wrong has its default meanwhile."""

    def __init__(self, text: str, file: str) -> None:
        self._lines = text.splitlines()
        self._file = file
        self.mistakes: list[str] = []

    def policy(self, whole: Table) -> Policy:
        for key in whole:
            if key not in _TOP:
                self._unknown((key,), _TOP)
        header = whole.get("header", "")
        if not isinstance(header, str) or (header and not _HEADER.fullmatch(header)):
            self._wrong(("header",), "must be the name of a header, as in: x-tenant")
            header = ""
        classes = self._classes(whole)
        tenants, names, digests = {}, dict[str, str](), dict[str, str]()
        for name, table in self._tables(whole, "tenants"):
            path = ("tenants", name)
            if name == EVERYBODY:
                self._wrong(path, f"means everybody who is nobody else: write [{EVERYBODY}]")
            tenants[name] = self._tenant(name, path, self._checked(path, table, _NAMED_TENANT), classes)
            self._known_by((*path, "header_values"), table, str, names)
            self._known_by((*path, "keys"), table, _digest, digests)
        if names and not header:
            self._wrong(
                ("tenants",), 'header_values need the name of their header: write header = "x-tenant" at the top'
            )
        everybody = self._tenant(
            EVERYBODY, (EVERYBODY,), self._checked((EVERYBODY,), whole.get(EVERYBODY, {}), _TENANT), classes
        )
        return Policy(
            classes=classes,
            tenants=tenants,
            everybody=everybody,
            header=header.lower(),
            names=names,
            digests=digests,
            llms=self._models(whole, "llms", _LLM, ModelLimits()),
            models=self._models(whole, "models", _OTHER, ModelLimits(tokens=False)),
            keeping=self._keeping(self._checked((_KEYED,), whole.get(_KEYED, {}), _KEEPING)),
        )

    @staticmethod
    def _keeping(table: Table) -> KeepLimits:
        given = dict(table)
        if "grace_seconds" in given:
            given["grace_ns"] = int(given.pop("grace_seconds") * 1e9)
        return KeepLimits(**given)

    def _classes(self, whole: Table) -> dict[str, PriorityClass]:
        classes: dict[str, PriorityClass] = {}
        orders: dict[int, str] = {}
        for name, table in self._tables(whole, "classes"):
            path = ("classes", name)
            classes[name] = PriorityClass(name, **self._checked(path, table, _CLASS))
            other = orders.setdefault(classes[name].order, name)
            if other != name:
                self._wrong((*path, "order"), f"is that of class '{other}', too; each class has an order of its own")
        return classes or {EVERYBODY: PriorityClass()}

    def _tenant(self, name: str, path: Path, table: Table, classes: Mapping[str, PriorityClass]) -> Tenant:
        least = max(classes.values(), key=lambda level: level.order).name
        level = table.get("class", least)
        if level not in classes:
            self._wrong((*path, "class"), f"'{level}' is no class.{_meant(level, classes)}")
            level = least
        rates: dict[str, Any] = {}
        for rate in _RATES:
            per_minute: int = table.get(f"{rate}_per_minute", 0)
            if f"{rate}_burst" in table and not per_minute:
                self._wrong((*path, f"{rate}_burst"), f"means nothing without {rate}_per_minute")
            rates[rate] = Rate(per_minute, table.get(f"{rate}_burst", per_minute))
        plain = {key: table[key] for key in ("weight", "concurrency", "retry_fraction") if key in table}
        return Tenant(name, level, **rates, **plain)

    def _models(
        self, whole: Table, kind: str, keys: Mapping[str, tuple[str, _Kind]], default: ModelLimits
    ) -> dict[str, ModelLimits]:
        kinds = {key: allowed for key, (_, allowed) in keys.items()}
        found = {
            name: {keys[key][0]: value for key, value in self._checked((kind, name), table, kinds).items()}
            for name, table in self._tables(whole, kind)
        }
        general = dataclasses.replace(default, **found.pop(ANY_MODEL, {}))
        return {ANY_MODEL: general, **{name: dataclasses.replace(general, **own) for name, own in found.items()}}

    def _tables(self, whole: Table, key: str) -> Iterator[tuple[str, Table]]:
        tables = whole.get(key, {})
        if not isinstance(tables, dict):
            self._wrong((key,), f"must be tables, as in: [{key}.name]")
            return
        yield from ((name, table) for name, table in tables.items() if self._is_table((key, name), table))

    def _is_table(self, path: Path, table: object) -> bool:
        if not isinstance(table, dict):
            self._wrong(path, f"must be a table: write [{'.'.join(path)}] and its keys below")
        return isinstance(table, dict)

    def _checked(self, path: Path, table: object, keys: Mapping[str, _Kind]) -> Table:
        """Return what of a table is right."""
        right: Table = {}
        if not isinstance(table, dict):
            self._is_table(path, table)
            return right
        for key, value in table.items():
            if key not in keys:
                self._unknown((*path, key), tuple(keys))
            elif keys[key].fits(value):
                right[key] = value
            else:
                self._wrong((*path, key), f"must be {keys[key].words}")
        return right

    def _known_by(self, path: Path, table: object, stored: Callable[[str], str], owners: dict[str, str]) -> None:
        """Note what a tenant is known by. Keys are secrets: no mistake tells one."""
        values = table.get(path[-1], []) if isinstance(table, dict) else []
        for place, value in enumerate(values if _TEXTS.fits(values) else (), 1):
            own = stored(value)
            if not own:
                self._wrong(path, f"number {place} must have 64 hexadecimal digits after sha256:")
            elif (other := owners.setdefault(own, path[1])) != path[1]:
                self._wrong(path, f"number {place} is one of tenant '{other}', too")

    def _unknown(self, path: Path, known: tuple[str, ...]) -> None:
        self._wrong(path, f"is not known.{_meant(path[-1], known)}")

    def _wrong(self, path: Path, what: str) -> None:
        line = self._line(path)
        place = f"{self._file}:{line}" if line else self._file
        self.mistakes.append(f"{place}: {'.'.join(path)}: {what}")

    def _line(self, path: Path) -> int:
        """Return the line of a key, or of the nearest table around it; 0 if it is written in some unusual way."""
        for length in range(len(path), 0, -1):
            table: Path = ()
            for number, line in enumerate(self._lines, 1):
                if match := re.match(r"\s*\[([^\[\]]+)\]", line):
                    table = _split(match[1])
                    if table == path[:length]:
                        return number
                elif (match := re.match(r"\s*([^=#]+?)\s*=", line)) and (*table, *_split(match[1])) == path[:length]:
                    return number
        return 0


def _digest(key: str) -> str:
    """Return the digest of a key, or the one that it is; nothing where that is none."""
    kind, colon, digest = key.partition(":")
    if kind != "sha256" or not colon:
        return digest_of(key)
    return digest.lower() if _DIGEST.fullmatch(digest.lower()) else ""


def _split(dotted: str) -> Path:
    """Split a dotted key; quotes around its parts do not count."""
    return tuple(part.strip().strip("\"'") for part in re.findall(r'"[^"]*"|\'[^\']*\'|[^.]+', dotted))


def _meant(wrong: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    meant = nearest(wrong, known)
    return f" Did you mean {meant}?" if meant else f" There are: {', '.join(known)}."
