"""The admission policy (tenants, classes, quotas and limits) as plain data, and its parser for the policy file."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from nerite.config.mistake import nearest
from nerite.core.errors import InvalidArgument
from nerite.core.request import EVERYBODY, Caller
from nerite.ledger.prices import MILLION, PriceList, read_prices
from nerite.redis.settings import RedisSettings, settings_of_address

ANY_MODEL: Final = "*"


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """Limits on the answers kept for idempotency keys, over all models."""

    grace_ns: int = 30_000_000_000
    """How long an answer is kept for a disconnected client; 0 to keep none."""
    max_answers: int = 1000
    """Maximum number of complete answers."""
    max_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """Class of requests of equal importance."""

    name: str = EVERYBODY
    order: int = 0
    """Smaller values are more important: the class with the largest is shed first."""
    share: int = 1
    """Weight of the class relative to other classes that have waiting requests."""
    ttft_seconds: float = 0.0
    """Guaranteed time to first token. Requests that cannot meet it are rejected. 0 for no guarantee."""


IDLE: Final = PriorityClass("idle", order=2**63)
"""Class that every tenant may select. Its requests never wait: they are admitted while nobody waits and room is left,
and an engine preempts them for others."""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Parameters of a token bucket."""

    per_minute: int = 0
    """0 for no limit."""
    burst: int = 0
    """Maximum amount used at once after a period of inactivity."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant with its quotas and its weight."""

    name: str = EVERYBODY
    level: str = EVERYBODY
    """Name of its class. A request may select a less important class, never a more important one."""
    weight: int = 1
    """Weight within its class relative to other tenants that have waiting requests."""
    input_tokens: RateLimit = RateLimit()
    output_tokens: RateLimit = RateLimit()
    requests: RateLimit = RateLimit()
    bytes: RateLimit = RateLimit()
    concurrency: int = 0
    """Maximum number of requests that wait or run; 0 for no limit."""
    retry_fraction: float = 1.0
    """Maximum fraction of its requests that may be retries."""
    sequence_share: float = 0.75
    """Maximum fraction of a model's slots that its sequences may hold; they may hold one at least."""
    tokens_per_month: int = 0
    """Tokens of input and output in a calendar month, over all servers; 0 for no limit."""
    money_per_month: int = 0
    """What these tokens may cost, in millionths of the currency of the price list; 0 for no limit."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of a model on single requests and on their number. 0 for no limit."""

    tokens: bool = True
    """The model is an LLM. For other models, sizes are in bytes and there are no limits on output."""
    max_input: int = 0
    max_output: int = 0
    context_window: int = 0
    max_running: int = 0
    """Maximum number of sequences that an engine runs at once, or of requests that another model executes."""
    queue_length: int = 1000
    queue_size: int = 0
    """Maximum number of waiting tokens (input and expected output) or bytes."""
    overcommit: float = 0.0
    """Fraction of the KV blocks that may be reserved beyond those that exist."""


@dataclass(frozen=True, slots=True)
class SharedQuotaSettings:
    """The Redis over which servers share the quotas of tenants."""

    redis: RedisSettings
    outage_share: float | None = None
    """Fraction of each quota that a server admits while Redis is away; None: one part of as many as there are."""


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Content of the policy file. The default limits nothing but the length of queues."""

    classes: Mapping[str, PriorityClass] = field(default_factory=lambda: {EVERYBODY: PriorityClass()})
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    everybody: Tenant = Tenant()
    header: str = ""
    """Lower-case name of the header whose value identifies tenants; empty if only keys do."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of tenants by header value."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Names of tenants by the hexadecimal SHA-256 of a key."""
    llms: Mapping[str, ModelLimits] = field(default_factory=dict)
    models: Mapping[str, ModelLimits] = field(default_factory=dict)
    keeping: RetentionLimits = field(default_factory=RetentionLimits)
    """Limits on the answers kept for idempotency keys."""
    prices: PriceList | None = None
    """What tokens cost, for budgets in money."""
    shared: SharedQuotaSettings | None = None
    """The quotas hold over all servers with the same Redis; None: each server has its own."""

    def tenant_of(self, key: str = "", value: str = "") -> Tenant:
        """Return the tenant identified by ``key``, or else by the header ``value``."""
        name = self.digests.get(digest_of(key), "") if key else ""
        return self.tenants.get(name or self.names.get(value, ""), self.everybody)

    def tenant(self, name: str) -> Tenant:
        """Return a tenant by name; the default tenant if it is unknown."""
        return self.tenants.get(name, self.everybody)

    def order_of(self, caller: Caller | None) -> int:
        """Return the order of a caller's class."""
        if caller is None:
            return 0
        tenant = self.tenant(caller.tenant)
        return (self.class_of(tenant, caller.wanted_class) or self.classes[tenant.level]).order

    def class_of(self, tenant: Tenant, wanted: str = "") -> PriorityClass | None:
        """Return the class of a request; None if the tenant may not use the class ``wanted``."""
        own = self.classes[tenant.level]
        if not wanted:
            return own
        if wanted == IDLE.name:
            return IDLE
        other = self.classes.get(wanted)
        return other if other is not None and other.order >= own.order else None

    def limits_of(self, model: str, tokens: bool = True) -> ModelLimits:
        """Return the limits of a model. ``tokens``: it is an LLM."""
        table = self.llms if tokens else self.models
        return table.get(model) or table.get(ANY_MODEL) or ModelLimits(tokens=tokens)


def digest_of(key: str) -> str:
    """Return the digest under which a key is stored; keys themselves are not kept."""
    return hashlib.sha256(key.encode()).hexdigest()


# Parser of the policy file. Every mistake is reported with its line, its key and the remedy.

Table: TypeAlias = dict[str, Any]
Path: TypeAlias = tuple[str, ...]


class _Kind(NamedTuple):
    """Type of a value in the policy file: its description and its check."""

    words: str
    fits: Callable[[Any], bool]


def _is_integer(value: object) -> bool:
    # TOML's range of integers: a larger one would overflow when multiplied by a fraction.
    return isinstance(value, int) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def _is_number(value: object) -> bool:
    return _is_integer(value) or (isinstance(value, float) and abs(value) <= _LARGEST)


_LARGEST: Final = 2**63 - 1
_MOST_MONEY: Final = 10**9


_COUNT: Final = _Kind("an integer >= 0", lambda value: _is_integer(value) and value >= 0)
_WEIGHT: Final = _Kind("an integer >= 1", lambda value: _is_integer(value) and value >= 1)
_ORDER: Final = _Kind("an integer", _is_integer)
_SECONDS: Final = _Kind("a number of seconds >= 0", lambda value: _is_number(value) and value >= 0)
_PART: Final = _Kind("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
_SHARE: Final = _Kind("a number above 0, 1 at most", lambda value: _is_number(value) and 0 < value <= 1)
_MONEY: Final = _Kind("a number >= 0", lambda value: _is_number(value) and 0 <= value <= _MOST_MONEY)
_TEXT: Final = _Kind("a non-empty string", lambda value: isinstance(value, str) and value != "")
_TEXTS: Final = _Kind(
    "a list of non-empty strings",
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
    "sequence_share": _SHARE,
    "tokens_per_month": _COUNT,
    "money_per_month": _MONEY,
}
_PLAIN: Final = ("weight", "concurrency", "retry_fraction", "sequence_share", "tokens_per_month")
"""Settings of a tenant that are taken as they are."""
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
_REDIS: Final = {"url": _TEXT, "outage_share": _PART}
_TOP: Final = ("header", "prices", "classes", "tenants", EVERYBODY, "llms", "models", _KEYED, "redis")
_DIGEST: Final = re.compile("[0-9a-f]{64}")
_HEADER: Final = re.compile("[A-Za-z0-9-]+")


def parse_policy(text: str, file: str = "policy", redis: RedisSettings | None = None) -> AdmissionPolicy:
    """Return the policy in ``text``. Raises ``InvalidArgument`` with all mistakes, one per line.

    ``redis`` takes precedence over the one that the policy names.
    """
    try:
        whole = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # invalid TOML, overlong integers, deep nesting
        raise InvalidArgument(f"{file}: {error}") from None
    reader = _Reader(text, file, redis)
    policy = reader.policy(whole)
    if reader.mistakes:
        raise InvalidArgument("\n".join(reader.mistakes))
    return policy


class _Reader:
    """Reads the tables and collects mistakes; invalid values are replaced by their defaults."""

    def __init__(self, text: str, file: str, redis: RedisSettings | None) -> None:
        self._lines = text.splitlines()
        self._file = file
        self._redis = redis
        self.mistakes: list[str] = []

    def policy(self, whole: Table) -> AdmissionPolicy:
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
                self._wrong(path, f"is reserved for callers without a tenant of their own: write [{EVERYBODY}]")
            tenants[name] = self._tenant(name, path, self._checked(path, table, _NAMED_TENANT), classes)
            self._register((*path, "header_values"), table, str, names)
            self._register((*path, "keys"), table, _digest, digests)
        if names and not header:
            self._wrong(
                ("tenants",), 'header_values require the name of the header: write header = "x-tenant" at the top'
            )
        everybody = self._tenant(
            EVERYBODY, (EVERYBODY,), self._checked((EVERYBODY,), whole.get(EVERYBODY, {}), _TENANT), classes
        )
        shared = self._shared(whole)
        for name, tenant in tenants.items():
            self._check_budget(("tenants", name), tenant, shared, priced="prices" in whole)
        self._check_budget((EVERYBODY,), everybody, shared, priced="prices" in whole)
        return AdmissionPolicy(
            prices=self._prices(whole),
            classes=classes,
            tenants=tenants,
            everybody=everybody,
            header=header.lower(),
            names=names,
            digests=digests,
            llms=self._models(whole, "llms", _LLM, ModelLimits()),
            models=self._models(whole, "models", _OTHER, ModelLimits(tokens=False)),
            keeping=self._keeping(self._checked((_KEYED,), whole.get(_KEYED, {}), _KEEPING)),
            shared=shared,
        )

    def _shared(self, whole: Table) -> SharedQuotaSettings | None:
        table = self._checked(("redis",), whole.get("redis", {}), _REDIS)
        settings = self._redis
        if "url" in table:
            try:
                found = settings_of_address(table["url"])
            except InvalidArgument as error:
                self._wrong(("redis", "url"), error.message)
            else:
                settings = settings or found
        elif settings is None and "redis" in whole:
            self._wrong(("redis",), 'needs the address of Redis, as in: url = "redis://127.0.0.1:6379"')
        return None if settings is None else SharedQuotaSettings(settings, table.get("outage_share"))

    def _check_budget(self, path: Path, tenant: Tenant, shared: SharedQuotaSettings | None, *, priced: bool) -> None:
        for key in ("tokens_per_month", "money_per_month"):
            if getattr(tenant, key) and shared is None:
                what = "needs a Redis, which keeps the use of a month when a server ends: write [redis] and its url"
                self._wrong((*path, key), what)
        if tenant.money_per_month and not priced:
            self._wrong((*path, "money_per_month"), 'needs a price list: write prices = "prices.toml" at the top')

    @staticmethod
    def _keeping(table: Table) -> RetentionLimits:
        given = dict(table)
        if "grace_seconds" in given:
            given["grace_ns"] = int(given.pop("grace_seconds") * 1e9)
        return RetentionLimits(**given)

    def _classes(self, whole: Table) -> dict[str, PriorityClass]:
        classes: dict[str, PriorityClass] = {}
        orders: dict[int, str] = {}
        for name, table in self._tables(whole, "classes"):
            path = ("classes", name)
            if name == IDLE.name:
                self._wrong(path, "is reserved for requests in idle room, such as items of batches: take another name")
            classes[name] = PriorityClass(name, **self._checked(path, table, _CLASS))
            other = orders.setdefault(classes[name].order, name)
            if other != name:
                self._wrong(
                    (*path, "order"), f"is already used by class '{other}'; each class needs an order of its own"
                )
        return classes or {EVERYBODY: PriorityClass()}

    def _tenant(self, name: str, path: Path, table: Table, classes: Mapping[str, PriorityClass]) -> Tenant:
        least = max(classes.values(), key=lambda level: level.order).name
        level = table.get("class", least)
        if level not in classes:
            self._wrong((*path, "class"), f"'{level}' is not a class.{_suggestion(level, classes)}")
            level = least
        rates: dict[str, Any] = {}
        for rate in _RATES:
            per_minute: int = table.get(f"{rate}_per_minute", 0)
            if f"{rate}_burst" in table and not per_minute:
                self._wrong((*path, f"{rate}_burst"), f"has no effect without {rate}_per_minute")
            rates[rate] = RateLimit(per_minute, table.get(f"{rate}_burst", per_minute))
        plain: dict[str, Any] = {key: table[key] for key in _PLAIN if key in table}
        if "money_per_month" in table:
            plain["money_per_month"] = round(table["money_per_month"] * MILLION)
        return Tenant(name, level, **rates, **plain)

    def _prices(self, whole: Table) -> PriceList | None:
        """Return the price list, whose path is relative to the directory of the policy file."""
        path = whole.get("prices")
        if path is None:
            return None
        try:
            if not isinstance(path, str) or not path:
                raise InvalidArgument('must be the path of a price list, as in: prices = "prices.toml"')
            return read_prices(pathlib.Path(self._file).parent / path)
        except InvalidArgument as error:
            self._wrong(("prices",), error.message)
            return None

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
        """Return the valid entries of a table."""
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

    def _register(self, path: Path, table: object, stored: Callable[[str], str], owners: dict[str, str]) -> None:
        """Register the keys or header values of a tenant. Keys are secrets, so error messages never contain one."""
        values = table.get(path[-1], []) if isinstance(table, dict) else []
        for place, value in enumerate(values if _TEXTS.fits(values) else (), 1):
            own = stored(value)
            if not own:
                self._wrong(path, f"entry {place} must have 64 hexadecimal digits after sha256:")
            elif (other := owners.setdefault(own, path[1])) != path[1]:
                self._wrong(path, f"entry {place} already belongs to tenant '{other}'")

    def _unknown(self, path: Path, known: tuple[str, ...]) -> None:
        self._wrong(path, f"is not known.{_suggestion(path[-1], known)}")

    def _wrong(self, path: Path, what: str) -> None:
        line = self._line(path)
        place = f"{self._file}:{line}" if line else self._file
        self.mistakes.append(f"{place}: {'.'.join(path)}: {what}")

    def _line(self, path: Path) -> int:
        """Return the line of a key, or of its nearest enclosing table; 0 if neither is found."""
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
    """Return the digest of a key, which may itself be given as ``sha256:`` and a digest; empty if that is invalid."""
    kind, colon, digest = key.partition(":")
    if kind != "sha256" or not colon:
        return digest_of(key)
    return digest.lower() if _DIGEST.fullmatch(digest.lower()) else ""


def _split(dotted: str) -> Path:
    """Split a dotted key and strip the quotes around its parts."""
    return tuple(part.strip().strip("\"'") for part in re.findall(r'"[^"]*"|\'[^\']*\'|[^.]+', dotted))


def _suggestion(wrong: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    meant = nearest(wrong, known)
    return f" Did you mean {meant}?" if meant else f" There are: {', '.join(known)}."
