"""Reads a cluster file. Every mistake is reported with file, line, key and remedy; unknown keys are refused."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from nerite.balancing.member import Member, ServerKind
from nerite.cluster import pool_tables
from nerite.cluster.addresses import MAX_MEMBERS, member_of, split_address
from nerite.cluster.kubernetes_names import service_of
from nerite.cluster.settings import ClusterSettings, MemberSource, PoolSettings, RouterSettings
from nerite.cluster.table_reader import (
    HEADER,
    KeyPath,
    TableKey,
    TableReader,
    read_count,
    read_flag,
    read_interval,
    read_key,
    read_names,
    read_number,
    read_one_of,
    read_port,
    read_text,
)
from nerite.config.flag import BadValue, host_name
from nerite.config.watched_file import read_content
from nerite.core.client_text import target_error
from nerite.core.durations import duration_of
from nerite.core.errors import InvalidArgument

_MAX_FILE: Final = 4 << 20
_MAX_POOLS: Final = 256
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RAY_POOL: Final = re.compile(rf"{_NAME.pattern}/{_NAME.pattern}")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]{0,15}://[A-Za-z0-9._:\[\]-]{1,253}|null")


def _slots(value: object) -> float:
    number = read_number(value)
    if not 0 <= number <= 1e6:
        raise ValueError("must be a number from 0 to 1000000: requests for each unit of a member's capacity")
    return number


def _address(value: object) -> str:
    text = read_text(value)
    split_address(text)
    return text


def _ray_pool(value: object) -> str:
    text = read_text(value)
    if not _RAY_POOL.fullmatch(text):
        raise ValueError('must be NAME/POOL of a cluster that nerite ray up has started, as in "platform/interactive"')
    return text


def _origins(value: object) -> tuple[str, ...]:
    origins = read_names(value)
    if wrong := [each for each in origins if each != "*" and not _ORIGIN.fullmatch(each)]:
        raise ValueError(f'must be origins, as in ["https://app.example.com"], or ["*"], not \'{wrong[0][:80]}\'')
    return origins


def _paths(value: object) -> tuple[str, ...]:
    paths = read_names(value)
    if wrong := [each for each in paths if not each.startswith("/v1/") or target_error(each)]:
        raise ValueError(f"must be paths under /v1, as in [\"/v1/images/edits\"], not '{wrong[0][:80]}'")
    return paths


def _hosts(value: object) -> tuple[str, ...]:
    try:
        return tuple(name for text in read_names(value) for name in host_name.read(text))
    except BadValue as error:
        raise ValueError(f"must be a list of hosts: {error}") from None


def _aliases(value: object) -> tuple[tuple[str, str], ...]:
    pairs = [each.partition("=") for each in read_names(value)]
    if not all(pattern and model for pattern, _, model in pairs):
        raise ValueError('must be names and the models that answer for them, as in ["claude-*=chat"]')
    return tuple((pattern, model) for pattern, _, model in pairs)


def _flags(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) and each.startswith("--") for each in value):
        raise ValueError('must be a list of flags of nerite serve, as in ["--log-verbose=1"]')
    return tuple(value)


def _header(value: object) -> str:
    if not isinstance(value, str) or not HEADER.fullmatch(value):
        raise ValueError("must be the name of a header, as in x-session-id")
    return value.lower()


_ROUTER: Final[Mapping[str, TableKey]] = {
    "address": TableKey("address", read_text),
    "allowed-hosts": TableKey("allowed_hosts", read_names),
    "http-port": TableKey("http_port", read_port),
    "grpc-port": TableKey("grpc_port", read_port),
    "metrics-port": TableKey("metrics_port", read_port),
    "policy-file": TableKey("policy_file", read_text),
    "admin-key": TableKey("admin_key", read_key),
    "redis": TableKey("redis", read_text),
    "ledger": TableKey("ledger", read_text),
    "member-key-file": TableKey("member_key_file", read_text),
    "batches": TableKey("batches", read_text),
    "batch-files": TableKey("batch_files", read_text),
    "batch-concurrency": TableKey("batch_concurrency", read_count(1, 65536)),
    "batch-storage-bytes": TableKey("batch_storage_bytes", read_count(0, 1 << 62)),
    "batch-lease": TableKey("batch_lease", read_interval),
    "max-body": TableKey("max_body", read_count(1024, 1 << 40)),
    "timeout": TableKey("timeout", duration_of),
    "connect-timeout": TableKey("connect_timeout", read_interval),
    "attempts": TableKey("attempts", read_count(1, 16)),
    "max-connections": TableKey("max_connections", read_count(0, 1 << 24)),
    "max-bytes-in-flight": TableKey("max_bytes_in_flight", read_count(0, 1 << 62)),
    "cors-origins": TableKey("cors_origins", _origins),
    "paths": TableKey("paths", _paths),
    "model-aliases": TableKey("model_aliases", _aliases),
    "webhook-allowed-hosts": TableKey("webhook_allowed_hosts", _hosts),
    "exit-timeout": TableKey("exit_timeout", duration_of),
    "exit-keepalive": TableKey("exit_keepalive", duration_of),
    "access-log": TableKey("access_log", read_flag),
}
_FILES: Final = ("policy_file", "ledger", "member_key_file", "batches", "batch_files")
"""Settings of the router that are paths, or addresses of databases."""
_POOL: Final[Mapping[str, TableKey]] = {
    "kind": TableKey("kind", read_one_of([str(kind) for kind in ServerKind])),
    "grpc-port": TableKey("grpc_port", read_port),
    "health-interval": TableKey("health_interval", read_interval),
    "classes": TableKey("classes", read_names),
    "serves": TableKey("serves", read_names),
    "borrows": TableKey("borrows", read_flag),
    "lends": TableKey("lends", _slots),
    "reserve": TableKey("reserve", read_count(0, MAX_MEMBERS)),
    "preempts": TableKey("preempts", read_flag),
    "session-header": TableKey("session_header", _header),
    "metrics-port": TableKey("metrics_port", read_port),
    "hold-requests": TableKey("hold_requests", read_count(0, 1 << 20)),
    "hold-timeout": TableKey("hold_timeout", read_interval),
}
_SOURCES: Final[Mapping[str, TableKey]] = {
    "members-file": TableKey("file", read_text),
    "dns": TableKey("dns", _address),
    "kubernetes": TableKey("kubernetes", service_of),
    "ray": TableKey("ray", _ray_pool),
    "models": TableKey("models", read_text),
}
_OF_MODELS: Final[Mapping[str, TableKey]] = {
    "replicas": TableKey("replicas", read_count(1, 1024)),
    "flags": TableKey("flags", _flags),
}
_POOL_KEYS: Final = ("name", *_POOL, *pool_tables.BALANCING, *pool_tables.TABLES, "members", *_SOURCES, *_OF_MODELS)


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
    reader = _ClusterReader(text, file)
    settings = reader.cluster(whole)
    if reader.mistakes:
        raise InvalidArgument("\n".join(mistake for _, mistake in sorted(reader.mistakes, key=lambda each: each[0])))
    return settings


class _ClusterReader(TableReader):
    """Reads a whole cluster file."""

    def cluster(self, whole: Mapping[str, Any]) -> ClusterSettings:
        self.refuse_unknown((), whole, ("router", "pool"))
        router = self._router(whole.get("router", {}))
        ports = {"http-port": router.http_port, "grpc-port": router.grpc_port, "metrics-port": router.metrics_port}
        for place, (key, number) in enumerate(ports.items()):
            if number and number in list(ports.values())[:place]:
                self.wrong(("router", key), f"is {number} like that of another port: choose another")
        router = dataclasses.replace(router, **self._paths_of(router))
        tables = whole.get("pool", [])
        if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
            self.wrong(("pool",), "must be tables: write [[pool]] and its keys below")
            tables = []
        elif not tables:
            self.wrong(("pool",), "there is none: write [[pool]] and below it a name and members")
        elif len(tables) > _MAX_POOLS:
            self.wrong(("pool",), f"there are {len(tables)}, more than {_MAX_POOLS}")
            tables = []
        pools = tuple(self._pool(place, table) for place, table in enumerate(tables))
        self._check_names(pools)
        return ClusterSettings(router, pools, self._file)

    def _paths_of(self, router: RouterSettings) -> dict[str, Any]:
        """Return the files of the router, by their settings, relative to the directory of the cluster file."""
        remote = "://" in router.batches and not router.batches.startswith("sqlite:")
        if remote and not router.batch_files:
            what = "is a database on another machine: write batch-files, a directory that all routers share, too"
            self.wrong(("router", "batches"), what)
        elif router.batch_files and not router.batches:
            self.wrong(("router", "batch-files"), "has an effect with batches only: add that, or remove it")
        if router.member_key_file and not router.policy_file:
            what = "tells members who sends a request, which policy-file says: add that, or remove it"
            self.wrong(("router", "member-key-file"), what)
        paths = {name: getattr(router, name) for name in _FILES}
        beside = {name: self.beside(path) for name, path in paths.items() if path and "://" not in path}
        return beside | {"admin_key": self.key_beside(router.admin_key)}

    def _router(self, table: object) -> RouterSettings:
        path = ("router",)
        tls = table.get("tls") if isinstance(table, dict) else None
        if isinstance(table, dict):
            table = {key: value for key, value in table.items() if key != "tls"}
        values = self.read(path, table, _ROUTER)
        if tls is not None:
            values["tls"] = pool_tables.port_tls(self, (*path, "tls"), tls)
        return RouterSettings(**values)

    def _pool(self, place: int, table: Mapping[str, Any]) -> PoolSettings:
        path = ("pool", place)
        self.refuse_unknown(path, table, _POOL_KEYS)
        name = table.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            self.wrong((*path, "name"), 'must be 1 to 64 letters, digits or ._-, as in name = "interactive"')
            name = str(place)
        values = self.read(path, {key: table[key] for key in _POOL if key in table}, _POOL)
        kind = values["kind"] = ServerKind(values.get("kind", ServerKind.NERITE))
        source = self._source(path, table, kind, values.get("grpc_port", 0), values.get("metrics_port", 0))
        values["tls"] = pool_tables.member_tls(self, (*path, "tls"), table.get("tls", False))
        if source.models and values["tls"] is not None:
            self.wrong((*path, "tls"), "nerite up starts servers without TLS: remove it, or write members")
        if "placement" in table:
            values["placement"] = pool_tables.placement_of(
                self, (*path, "placement"), table["placement"], values, source
            )
        if "resources" in table:
            values["resources"] = pool_tables.resources_of(self, (*path, "resources"), table["resources"], source)
        if "rollout" in table:
            values["rollout"] = pool_tables.rollout_of(self, (*path, "rollout"), table["rollout"], kind, source)
            if "placement" in table:
                what = "has no effect with placement, where members hold different models: remove one of them"
                self.wrong((*path, "rollout"), what)
        balancing = pool_tables.balancing_of(self, path, table)
        scaling, target = pool_tables.scaling_of(self, path, table, source)
        return PoolSettings(name, source, balancing=balancing, scaling=scaling, scale_target=target, **values)

    def _source(
        self, path: KeyPath, table: Mapping[str, Any], kind: ServerKind, grpc_port: int, metrics_port: int
    ) -> MemberSource:
        given = [key for key in ("members", *_SOURCES) if key in table]
        if len(given) != 1:
            what = f"has {' and '.join(given)}: keep one of them" if given else "has no members"
            self.wrong(path, f'{what}. Write members = ["HOST:PORT"], members-file, dns, kubernetes, ray, or models')
            return MemberSource()
        for key in _OF_MODELS:
            if key in table and given != ["models"]:
                self.wrong((*path, key), f"has an effect with models only, and the pool has {given[0]}: remove it")
        if given == ["members"]:
            return MemberSource(members=self._members(path, table["members"], kind, grpc_port, metrics_port))
        values = self.read(path, {given[0]: table[given[0]]}, _SOURCES)
        for field in ("file", "models"):
            if field in values:
                values[field] = values[field] if "://" in values[field] else self.beside(values[field])
        if given == ["models"]:
            values |= self.read(path, {key: table[key] for key in _OF_MODELS if key in table}, _OF_MODELS)
        return MemberSource(**values)

    def _members(
        self, path: KeyPath, given: object, kind: ServerKind, grpc_port: int, metrics_port: int
    ) -> tuple[Member, ...]:
        path = (*path, "members")
        if not isinstance(given, list) or not 0 < len(given) <= MAX_MEMBERS:
            self.wrong(path, f'must be a list of 1 to {MAX_MEMBERS} members, as in members = ["10.0.0.1:8000"]')
            return ()
        found = []
        for place, each in enumerate(given, 1):
            try:
                found.append(member_of(each, kind, grpc_port, metrics_port))
            except ValueError as error:
                self.wrong(path, f"entry {place} {error}")
        return tuple(found)

    def _check_names(self, pools: Sequence[PoolSettings]) -> None:
        names: set[str] = set()
        members: dict[str, str] = {}
        for place, pool in enumerate(pools):
            if pool.name in names:
                self.wrong(("pool", place, "name"), f"'{pool.name}' is the name of another pool: choose another")
            names.add(pool.name)
            for member in pool.source.members:
                other = members.setdefault(member.name, pool.name)
                if other != pool.name or pool.source.members.count(member) > 1:
                    text = f"'{member.name}' is already a member of pool '{other}': give it another name, or remove it"
                    self.wrong(("pool", place, "members"), text)
                    break
