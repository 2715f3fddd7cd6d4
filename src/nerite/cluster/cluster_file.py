"""Reads a cluster file. Every mistake is reported with file, line, key and remedy; unknown keys are refused."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from nerite.autoscaling.policy import MOST_MEMBERS, ScalingPolicy
from nerite.balancing.member import Member, ServerKind
from nerite.balancing.model_placement import PlacementPolicy
from nerite.balancing.policy import ChoicePolicy, EjectionPolicy, PoolPolicy
from nerite.cluster.addresses import MAX_MEMBERS, member_of, split_address
from nerite.cluster.settings import (
    ClusterSettings,
    MemberSource,
    PlacedModel,
    PlacementSettings,
    PoolSettings,
    RouterSettings,
)  # fmt: skip
from nerite.config.mistake import nearest
from nerite.config.watched_file import read_content
from nerite.core.durations import duration_of
from nerite.core.errors import InvalidArgument
from nerite.core.sizes import size_of

KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys and, of arrays of tables, indices."""
_MAX_FILE: Final = 4 << 20
_MAX_POOLS: Final = 256
_WITH_REPOSITORY: Final = (ServerKind.NERITE, ServerKind.TRITON)
"""Kinds of servers that load and unload models on request."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEADER: Final = re.compile(r"[A-Za-z0-9-]{1,64}")


def _port(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 65536:
        raise ValueError("must be a port from 0 to 65535; 0 picks a free one")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value or "\0" in value or len(value) > 4096:
        raise ValueError("must be a non-empty string")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _count(least: int, most: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"must be an integer from {least} to {most}")
        return value

    return read


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError("must be a number")
    return float(value)


def _interval(value: object) -> float:
    seconds = duration_of(value)
    if seconds < 0.05:
        raise ValueError("must be at least 50ms")
    return seconds


def _address(value: object) -> str:
    text = _text(value)
    split_address(text)
    return text


def _one_of(values: Sequence[str]) -> Callable[[object], str]:
    def read(value: object) -> str:
        if value not in values:
            meant = nearest(value, values) if isinstance(value, str) else ""
            hint = f". Did you mean '{meant}'?" if meant else ""
            raise ValueError(f"must be one of {', '.join(values)}{hint}")
        return str(value)

    return read


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise ValueError('must be a list of names, as in ["batch"]')
    return tuple(value)


def _flags(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) and each.startswith("--") for each in value):
        raise ValueError('must be a list of flags of nerite serve, as in ["--log-verbose=1"]')
    return tuple(value)


def _header(value: object) -> str:
    if not isinstance(value, str) or not _HEADER.fullmatch(value):
        raise ValueError("must be the name of a header, as in x-session-id")
    return value.lower()


def _restricted_key(value: object) -> str:
    name, equals, key = value.partition("=") if isinstance(value, str) else ("", "", "")
    if not equals or not _HEADER.fullmatch(name) or not key.removeprefix("@") or not key.isprintable():
        raise ValueError('must be HEADER=VALUE or HEADER=@FILE, as in key = "X-Admin-Key=@/run/secrets/key"')
    return str(value)


class _Key(NamedTuple):
    """A key of a table: the name of its setting, and how its value is read."""

    field: str
    read: Callable[[object], Any]


_ROUTER: Final[Mapping[str, _Key]] = {
    "address": _Key("address", _text),
    "allowed-hosts": _Key("allowed_hosts", _names),
    "http-port": _Key("http_port", _port),
    "grpc-port": _Key("grpc_port", _port),
    "metrics-port": _Key("metrics_port", _port),
    "policy-file": _Key("policy_file", _text),
    "redis": _Key("redis", _text),
    "ledger": _Key("ledger", _text),
    "batches": _Key("batches", _text),
    "max-body": _Key("max_body", _count(1024, 1 << 40)),
    "timeout": _Key("timeout", duration_of),
    "connect-timeout": _Key("connect_timeout", _interval),
    "attempts": _Key("attempts", _count(1, 16)),
    "max-connections": _Key("max_connections", _count(0, 1 << 24)),
    "exit-timeout": _Key("exit_timeout", duration_of),
    "access-log": _Key("access_log", _flag),
}
_POOL: Final[Mapping[str, _Key]] = {
    "kind": _Key("kind", _one_of([str(kind) for kind in ServerKind])),
    "grpc-port": _Key("grpc_port", _port),
    "health-interval": _Key("health_interval", _interval),
    "classes": _Key("classes", _names),
    "serves": _Key("serves", _names),
    "borrows": _Key("borrows", _flag),
    "session-header": _Key("session_header", _header),
    "metrics-port": _Key("metrics_port", _port),
    "hold-requests": _Key("hold_requests", _count(0, 1 << 20)),
    "hold-timeout": _Key("hold_timeout", _interval),
}
_SOURCES: Final[Mapping[str, _Key]] = {
    "members-file": _Key("file", _text),
    "dns": _Key("dns", _address),
    "models": _Key("models", _text),
}
_OF_MODELS: Final[Mapping[str, _Key]] = {
    "replicas": _Key("replicas", _count(1, 1024)),
    "flags": _Key("flags", _flags),
}
_BALANCING: Final[Mapping[str, _Key]] = {
    "policy": _Key("choice", _one_of([str(policy) for policy in ChoicePolicy])),
    "prefix": _Key("prefix", _flag),
    "load-factor": _Key("load_factor", _number),
    "index-bytes": _Key("index_bytes", _count(0, 1 << 62)),
    "prefill-weight": _Key("prefill_weight", _number),
    "adapter-tokens": _Key("adapter_tokens", _number),
    "max-requests": _Key("max_requests", _number),
    "max-sequences": _Key("max_sequences", _count(0, 1 << 62)),
    "sequence-idle": _Key("sequence_idle", duration_of),
    "retry-share": _Key("retry_share", _number),
    "retry-floor": _Key("retry_floor", _number),
    "hedge-quantile": _Key("hedge_quantile", _number),
}
_EJECTION: Final[Mapping[str, _Key]] = {
    "consecutive-failures": _Key("consecutive_failures", _count(0, 1 << 62)),
    "failure-ratio": _Key("failure_ratio", _number),
    "request-volume": _Key("request_volume", _count(0, 1 << 62)),
    "interval": _Key("interval", duration_of),
    "base-ejection": _Key("base_ejection", duration_of),
    "max-ejection": _Key("max_ejection", duration_of),
    "max-ejected": _Key("max_ejected", _number),
}
_PLACED_MODEL: Final[Mapping[str, _Key]] = {
    "memory": _Key("memory", size_of),
    "least": _Key("least", _count(0, MAX_MEMBERS)),
    "most": _Key("most", _count(0, MAX_MEMBERS)),
}
_PLACEMENT: Final[Mapping[str, _Key]] = {**_PLACED_MODEL, "key": _Key("key", _restricted_key)}
_PLACEMENT_POLICY: Final[Mapping[str, _Key]] = {
    "target": _Key("target", _number),
    "rise": _Key("rise", duration_of),
    "fall": _Key("fall", duration_of),
    "hold": _Key("hold", duration_of),
    "retry": _Key("retry", duration_of),
    "load-timeout": _Key("patience", duration_of),
    "model-memory": _Key("unknown_bytes", size_of),
}
_SCALING: Final[Mapping[str, _Key]] = {
    "min": _Key("least", _count(0, MOST_MEMBERS)),
    "max": _Key("most", _count(1, MOST_MEMBERS)),
    "warm": _Key("warm", _count(0, MOST_MEMBERS)),
    "headroom": _Key("headroom", _number),
    "idle": _Key("idle", duration_of),
    "stabilization": _Key("stabilization", duration_of),
    "step": _Key("step", _number),
    "ttft": _Key("ttft", duration_of),
    "itl": _Key("itl", duration_of),
    "latency": _Key("latency", duration_of),
    "share": _Key("share", _number),
    "rate": _Key("rate", _number),
    "concurrency": _Key("concurrency", _number),
}
_POOL_KEYS: Final = ("name", *_POOL, *_BALANCING, "ejection", "placement", "scaling", "members", *_SOURCES, *_OF_MODELS)


def read_cluster(path: str) -> ClusterSettings:
    """Read a cluster file. Raises ``InvalidArgument`` with all mistakes, one per line."""
    found = read_content(path, _MAX_FILE)
    if found.problem:
        raise InvalidArgument(f"the cluster file '{path}' {found.problem}")
    try:
        text = found.data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: is not UTF-8 at byte {error.start}: save it as UTF-8") from None
    return parse_cluster(text, path)


def parse_cluster(text: str, file: str = "cluster.toml") -> ClusterSettings:
    """Return the settings in ``text``. Raises ``InvalidArgument`` with all mistakes, one per line."""
    try:
        whole = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # invalid TOML, overlong integers, deep nesting
        raise InvalidArgument(f"{file}: {error}") from None
    reader = _Reader(text, file)
    settings = reader.cluster(whole)
    if reader.mistakes:
        raise InvalidArgument("\n".join(mistake for _, mistake in sorted(reader.mistakes, key=lambda each: each[0])))
    return settings


class _Reader:
    """Reads the tables and collects mistakes; invalid values are replaced by their defaults."""

    def __init__(self, text: str, file: str) -> None:
        self._lines = _lines_of_keys(text)
        self._file = file
        self._folder = Path(file).parent
        self.mistakes: list[tuple[int, str]] = []
        """With the line of each; 0 if that is not known."""

    def cluster(self, whole: Mapping[str, Any]) -> ClusterSettings:
        self._refuse_unknown((), whole, ("router", "pool"))
        router = RouterSettings(**self._read(("router",), whole.get("router", {}), _ROUTER))
        ports = {"http-port": router.http_port, "grpc-port": router.grpc_port, "metrics-port": router.metrics_port}
        for place, (key, number) in enumerate(ports.items()):
            if number and number in list(ports.values())[:place]:
                self._wrong(("router", key), f"is {number} like that of another port: choose another")
        if router.policy_file:
            router = dataclasses.replace(router, policy_file=self._beside(router.policy_file))
        tables = whole.get("pool", [])
        if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
            self._wrong(("pool",), "must be tables: write [[pool]] and its keys below")
            tables = []
        elif not tables:
            self._wrong(("pool",), "there is none: write [[pool]] and below it a name and members")
        elif len(tables) > _MAX_POOLS:
            self._wrong(("pool",), f"there are {len(tables)}, more than {_MAX_POOLS}")
            tables = []
        pools = tuple(self._pool(place, table) for place, table in enumerate(tables))
        self._check_names(pools)
        return ClusterSettings(router, pools, self._file)

    def _pool(self, place: int, table: Mapping[str, Any]) -> PoolSettings:
        path = ("pool", place)
        self._refuse_unknown(path, table, _POOL_KEYS)
        name = table.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            self._wrong((*path, "name"), 'must be 1 to 64 letters, digits or ._-, as in name = "interactive"')
            name = str(place)
        values = self._read(path, {key: table[key] for key in _POOL if key in table}, _POOL)
        kind = values["kind"] = ServerKind(values.get("kind", ServerKind.NERITE))
        source = self._source(path, table, kind, values.get("grpc_port", 0), values.get("metrics_port", 0))
        if "placement" in table:
            values["placement"] = self._placement((*path, "placement"), table["placement"], values, source)
        balancing, scaling = self._balancing(path, table), self._scaling(path, table)
        return PoolSettings(name, source, balancing=balancing, scaling=scaling, **values)

    def _scaling(self, path: KeyPath, table: Mapping[str, Any]) -> ScalingPolicy | None:
        if "scaling" not in table:
            return None
        inner = (*path, "scaling")
        given = table["scaling"]
        values = self._read(inner, given, _SCALING)
        if not isinstance(given, dict):
            return None
        if "max" not in given:
            self._wrong(inner, "has no max, the largest number of members: add it, as in max = 4")
            return None
        if "models" in table and "replicas" in table:
            self._wrong((*path, "replicas"), "has no effect, since scaling has min and max: remove it")
        if "models" not in table and "warm" in values:
            self._wrong((*inner, "warm"), "has an effect with models only, whose servers nerite up starts: remove it")
        try:
            return ScalingPolicy(**values)
        except InvalidArgument as error:
            self._wrong(inner, error.message)
            return None

    def _placement(
        self, path: KeyPath, table: Mapping[str, Any], pool: Mapping[str, Any], source: MemberSource
    ) -> PlacementSettings:
        """Return the settings of a pool whose models the router places on its members."""
        if not isinstance(table, dict):
            self._read(path, table, {})
            return PlacementSettings()
        self._refuse_unknown(path, table, (*_PLACEMENT, *_PLACEMENT_POLICY, "models"))
        values = self._read(path, {key: table[key] for key in _PLACEMENT if key in table}, _PLACEMENT)
        policy = self._read(path, {key: table[key] for key in _PLACEMENT_POLICY if key in table}, _PLACEMENT_POLICY)
        try:
            values["policy"] = PlacementPolicy(**policy)
        except InvalidArgument as error:
            self._wrong(path, error.message)
        models = table.get("models", {})
        if not isinstance(models, dict):
            self._wrong((*path, "models"), 'must have a table for each model, as in resnet = { memory = "2GiB" }')
            models = {}
        values["models"] = {
            name: PlacedModel(**self._read((*path, "models", name), each, _PLACED_MODEL))
            for name, each in models.items()
        }
        if pool["kind"] not in _WITH_REPOSITORY:
            kinds = ", ".join(_WITH_REPOSITORY)
            self._wrong(path, f"servers of kind {pool['kind']} do not load models on request: it needs one of {kinds}")
        untold = any(not (each.memory or each.metrics) for each in source.members) or bool(source.dns)
        if untold and not (values.get("memory") or pool.get("metrics_port")):
            self._wrong(path, 'it is not known how much memory members have: add memory = "16GiB", or metrics-port')
        if values.get("key", "").partition("=")[2].startswith("@"):
            header, _, file = values["key"].partition("=")
            values["key"] = f"{header}=@{self._beside(file[1:])}"
        return PlacementSettings(**values)

    def _balancing(self, path: KeyPath, table: Mapping[str, Any]) -> PoolPolicy:
        values = self._read(path, {key: table[key] for key in _BALANCING if key in table}, _BALANCING)
        if "choice" in values:
            values["choice"] = ChoicePolicy(values["choice"])
        try:
            if "ejection" in table:
                path = (*path, "ejection")
                values["ejection"] = EjectionPolicy(**self._read(path, table["ejection"], _EJECTION))
                path = path[:-1]
            return PoolPolicy(**values)
        except InvalidArgument as error:
            self._wrong(path, error.message)
            return PoolPolicy()

    def _source(
        self, path: KeyPath, table: Mapping[str, Any], kind: ServerKind, grpc_port: int, metrics_port: int
    ) -> MemberSource:
        given = [key for key in ("members", *_SOURCES) if key in table]
        if len(given) != 1:
            what = f"has {' and '.join(given)}: keep one of them" if given else "has no members"
            self._wrong(path, f'{what}. Write members = ["HOST:PORT"], members-file, dns, or models')
            return MemberSource()
        for key in _OF_MODELS:
            if key in table and given != ["models"]:
                self._wrong((*path, key), f"has an effect with models only, and the pool has {given[0]}: remove it")
        if given == ["members"]:
            return MemberSource(members=self._members(path, table["members"], kind, grpc_port, metrics_port))
        values = self._read(path, {given[0]: table[given[0]]}, _SOURCES)
        for field in ("file", "models"):
            if field in values:
                values[field] = self._beside(values[field])
        if given == ["models"]:
            values |= self._read(path, {key: table[key] for key in _OF_MODELS if key in table}, _OF_MODELS)
        return MemberSource(**values)

    def _members(
        self, path: KeyPath, given: object, kind: ServerKind, grpc_port: int, metrics_port: int
    ) -> tuple[Member, ...]:
        path = (*path, "members")
        if not isinstance(given, list) or not 0 < len(given) <= MAX_MEMBERS:
            self._wrong(path, f'must be a list of 1 to {MAX_MEMBERS} members, as in members = ["10.0.0.1:8000"]')
            return ()
        found = []
        for place, each in enumerate(given, 1):
            try:
                found.append(member_of(each, kind, grpc_port, metrics_port))
            except ValueError as error:
                self._wrong(path, f"entry {place} {error}")
        return tuple(found)

    def _check_names(self, pools: Sequence[PoolSettings]) -> None:
        names: set[str] = set()
        members: dict[str, str] = {}
        for place, pool in enumerate(pools):
            if pool.name in names:
                self._wrong(("pool", place, "name"), f"'{pool.name}' is the name of another pool: choose another")
            names.add(pool.name)
            for member in pool.source.members:
                other = members.setdefault(member.name, pool.name)
                if other != pool.name or pool.source.members.count(member) > 1:
                    text = f"'{member.name}' is already a member of pool '{other}': give it another name, or remove it"
                    self._wrong(("pool", place, "members"), text)
                    break

    def _read(self, path: KeyPath, table: object, keys: Mapping[str, _Key]) -> dict[str, Any]:
        """Return the valid values of a table by the names of their settings."""
        if not isinstance(table, dict):
            self._wrong(path, f"must be a table: write [{_dotted(path)}] and its keys below")
            return {}
        self._refuse_unknown(path, table, tuple(keys))
        values = {}
        for key, value in table.items():
            if key in keys:
                try:
                    values[keys[key].field] = keys[key].read(value)
                except ValueError as error:
                    self._wrong((*path, key), str(error))
        return values

    def _refuse_unknown(self, path: KeyPath, table: Mapping[str, Any], known: Sequence[str]) -> None:
        for key in table:
            if key not in known:
                meant = nearest(key, known)
                hint = f"Did you mean {meant}?" if meant else f"There are: {', '.join(known)}."
                self._wrong((*path, key), f"is not known. {hint}")

    def _beside(self, path: str) -> str:
        """Return a path of the file relative to the directory of the file."""
        return str(self._folder / path)

    def _wrong(self, path: KeyPath, what: str) -> None:
        line = next(
            (self._lines[path[:length]] for length in range(len(path), 0, -1) if path[:length] in self._lines), 0
        )
        place = f"{self._file}:{line}" if line else self._file
        self.mistakes.append((line, f"{place}: {_dotted(path)}: {what}"))


def _dotted(path: KeyPath) -> str:
    return ".".join(part if isinstance(part, str) else str(part + 1) for part in path)


_TABLE: Final = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?")
_ENTRY: Final = re.compile(r"\s*([^=#\[\]{}\"']+?|\"[^\"]*\"|'[^']*')\s*=")


def _lines_of_keys(text: str) -> dict[KeyPath, int]:
    """Return the lines of tables and keys, as far as they are written one on a line."""
    found: dict[KeyPath, int] = {}
    counts: dict[str, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TABLE.match(line):
            table = tuple(part.strip().strip("\"'") for part in match[2].split("."))
            if match[1] == "[[":
                counts[match[2]] = counts.get(match[2], -1) + 1
                table = (*table, counts[match[2]])
            elif len(table) > 1 and table[0] in counts:
                table = (table[0], counts[str(table[0])], *table[1:])
            found.setdefault(table[:1], number)
            found.setdefault(table, number)
        elif match := _ENTRY.match(line):
            found.setdefault((*table, match[1].strip().strip("\"'")), number)
    return found
