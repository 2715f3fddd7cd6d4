"""Access to the APIs: callers (tenant, class, deadline), forwarded headers, and keys of restricted categories.

The header names are the same over HTTP and in gRPC metadata. Where possible they are ones that clients already send:
Envoy's, those of OpenAI's SDKs, and those of gRPC clients that retry.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from hmac import compare_digest
from typing import Final, NamedTuple

from nerite.admission.policy import IDLE, AdmissionPolicy
from nerite.balancing.response_ids import TAG_HEADER
from nerite.config.flag import RestrictedKey
from nerite.config.watched_file import WatchedFile, read_content
from nerite.core.client_text import checked_name
from nerite.core.errors import InvalidArgument, NeriteError, Restricted
from nerite.core.execution_observer import REQUEST_ID
from nerite.core.request import EVERYBODY, NAME, Caller, IdempotencyKey
from nerite.core.response import Parameter
from nerite.core.text import MAX_VALUE
from nerite.transports.http import reply
from nerite.transports.http.head import RequestHead, header_bytes_of
from nerite.transports.http.reply import Reply

CLASS: Final = "x-nerite-class"
TENANT: Final = "x-nerite-tenant"
ROUTER_KEY: Final = "x-nerite-router-key"
"""A router says who has sent a request, and proves with its key that it may."""
PAID: Final = "x-nerite-paid"
"""A router says that quotas were charged for an earlier attempt at the same item of a batch."""
OF_ROUTERS: Final = (TENANT, ROUTER_KEY, PAID, REQUEST_ID, TAG_HEADER)
"""Headers that routers add, and do not take from clients."""
TIMEOUTS: Final = ("x-nerite-timeout-ms", "x-envoy-expected-rq-timeout-ms")
KEYS: Final = ("authorization", "x-api-key")
RETRIES: Final = {"x-stainless-retry-count": 0, "grpc-previous-rpc-attempts": 0, "x-envoy-attempt-count": 1}
"""Retry count headers, each with its value on the first attempt."""
_RESERVED: Final = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)
"""Names that are never forwarded, besides those starting with ``triton_``: Triton's list."""
_BEARER: Final = re.compile(r"bearer +", re.IGNORECASE)
_LONGEST: Final = 1e12
"""Milliseconds, thirty years: of longer time limits."""
_SIGNIFICANT_DIGITS: Final = 2
"""Significant digits of a time limit. Callers are memoized, and exact limits would differ by microseconds."""

Get = Callable[[str], str | None]
"""Returns the value of a header by its lower-case name."""


class SenderHeaders(NamedTuple):
    """Everything in the head of an inference request apart from the inference itself."""

    forwarded: Mapping[str, Parameter]
    """Headers that are passed to the model as parameters."""
    caller: Caller | None = None
    idempotency_key: IdempotencyKey | None = None
    sticky_fields: Mapping[str, str] | None = None
    """Headers that keep the sender on an arm of a route; None if there are none."""


def header_text(name: str, value: str) -> str:
    """Validate a header that is used. Raises ``InvalidArgument`` if it is no valid name, or its own name is not.

    The length of the value is limited together with the head that contains it.
    """
    checked_name(name, "the name of a header")
    return checked_name(value, f"header '{name}'", MAX_VALUE)


def forwarded(fields: Iterable[tuple[str, str]], pattern: re.Pattern[str] | None) -> dict[str, Parameter]:
    """Return the headers that match ``pattern``, which are passed to the model as parameters.

    Raises ``InvalidArgument`` for a reserved name, and like ``header_text``.
    """
    if pattern is None:
        return {}
    found: dict[str, Parameter] = {}
    for name, value in fields:
        if pattern.search(name):
            if name in _RESERVED or name.startswith("triton_"):
                raise InvalidArgument(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
            found[name] = header_text(name, value)
    return found


def texts(get: Get) -> Get:
    """Wrap ``get`` so that it raises ``InvalidArgument`` for a header that is not UTF-8."""

    def text(name: str) -> str | None:
        value = get(name)
        return None if value is None else header_text(name, value)

    return text


def key_of(get: Get) -> IdempotencyKey | None:
    """Return the idempotency key of a request, if it has one."""
    value = get(NAME)
    return None if value is None else IdempotencyKey(value)


def sticky_fields(get: Get, names: Sequence[str]) -> Mapping[str, str] | None:
    """Return the headers of these names that a request has. Raises ``InvalidArgument`` for a value that is too long."""
    found = {name: checked_name(value, f"header '{name}'") for name in names if (value := get(name)) is not None}
    return found or None


def identity(key: str, caller: Caller) -> list[tuple[str, str]]:
    """Return the headers by which a router with a key tells a server who sends a request; none without a key."""
    if not key:
        return []
    return [(ROUTER_KEY, key), (TENANT, caller.tenant), *([(PAID, "1")] if caller.paid else [])]


class Callers:
    """Identifies the callers of requests. One per server, if a policy is in force or routers say who they are."""

    def __init__(self, policy: Callable[[], AdmissionPolicy], router_keys: AccessKeys | None = None) -> None:
        """``policy`` returns the current policy. When it changes, callers memoized on headers must be discarded.

        ``router_keys`` are those of routers whose word is taken for who has sent a request; None: of none.
        """
        self._policy = policy
        self._router_keys = router_keys

    def of(self, get: Get, timeout: float | None = None) -> Caller:
        """Return the caller who sent these headers and waits ``timeout`` seconds. Raises ``InvalidArgument``."""
        policy = self._policy()
        tenant = policy.tenant_of(_key(get), get(policy.header) or "" if policy.header else "")
        name, wanted, named = tenant.name, get(CLASS) or "", ""
        if self._router_keys is not None and (named := self._tenant_of_router(get, self._router_keys)):
            name = named
            if policy.class_of(policy.tenant(name), wanted) is None:  # the router's policy has it, but not this one
                wanted = ""
        limits = [1000 * timeout] if timeout is not None else []
        limits += _timeouts(get)
        patience = _rounded(min(limits)) if limits else 0
        return Caller(name, wanted, patience, _is_retry(get), bool(named), bool(named and get(PAID)))

    def figures_of(self, caller: Caller | None, remedy: str) -> str | None:
        """Return the tenant whose figures a caller without the key to those of all tenants sees; None: all.

        All are open if the policy has no tenants. Raises ``Restricted`` with ``remedy`` for a caller who is none.
        """
        tenants = self._policy().tenants
        if not tenants:
            return None
        if caller is None or caller.tenant not in tenants:
            raise Restricted(
                f"the figures of all tenants need a key: {remedy}. The key of a tenant shows that tenant's own figures"
            )
        return caller.tenant

    @staticmethod
    def _tenant_of_router(get: Get, keys: AccessKeys) -> str:
        """Return the tenant that a router names; empty if the request comes from none. Raises ``Restricted``."""
        key, name = get(ROUTER_KEY), get(TENANT)
        if key is None and name is None and get(PAID) is None:
            return ""
        if key is None or not keys.include(header_bytes_of(key)):
            raise Restricted(
                f"headers '{TENANT}' and '{PAID}' are taken from routers alone, which send one of the keys in "
                f"--router-key-file as '{ROUTER_KEY}'"
            )
        return checked_name(name or "", f"header '{TENANT}'")


def idle_caller(get: Get) -> Caller | None:
    """Return the caller of a request of the class idle, the only class without a policy; None for any other."""
    return Caller(EVERYBODY, IDLE.name) if get(CLASS) == IDLE.name else None


def _key(get: Get) -> str:
    """Return the API key of a request, as a bearer token or as it is; empty if there is none."""
    for name in KEYS:
        if value := get(name):
            return _BEARER.sub("", value, count=1)
    return ""


def _is_retry(get: Get) -> bool:
    return any(value.isdecimal() and float(value) > RETRIES[name] for name in RETRIES if (value := get(name)))


def timeout_of(get: Get) -> float:
    """Return the seconds that the headers say a client waits; 0 if they do not say. Raises ``InvalidArgument``."""
    return min(_timeouts(get), default=0.0) / 1000


def _timeouts(get: Get) -> list[float]:
    """Return the time limits in the headers, in milliseconds."""
    return [_number(name, value) for name in TIMEOUTS if (value := get(name)) is not None]


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise InvalidArgument(f"header '{name}' must be a positive number of milliseconds, got: '{value}'")
    return min(number, _LONGEST)


def _rounded(milliseconds: float) -> int:
    """Round milliseconds up to nanoseconds with few significant digits."""
    nanoseconds = max(math.ceil(milliseconds * 1e6), 1)
    step: int = 10 ** max(len(str(nanoseconds)) - _SIGNIFICANT_DIGITS, 0)
    return -(-nanoseconds // step) * step


# Keys that unlock restricted categories: literal, or in a file that is reloaded when it changes.

_MAX_FILE_BYTES: Final = 64 * 1024
_FORMAT: Final = "It must contain one key per line; empty lines and lines starting with '#' are ignored."


class KeyFileChange(NamedTuple):
    """Result of reading a key file: keys, or a problem."""

    keys: tuple[bytes, ...]
    problem: str = ""
    """Problem with the file, as the rest of a sentence about it; empty if the file has keys."""


class AccessKeys:
    """Set of header values, any of which opens a lock."""

    def __init__(self, values: Iterable[bytes]) -> None:
        self._values = tuple(values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def values(self) -> tuple[bytes, ...]:
        """The keys."""
        return self._values

    def replace(self, values: Iterable[bytes]) -> None:
        """Replace the keys: another process has read their file again."""
        self._values = tuple(values)

    def include(self, given: bytes) -> bool:
        """Return whether ``given`` is one of the keys. Constant-time, so that timing reveals no partial match."""
        return sum(compare_digest(value, given) for value in self._values) > 0


class KeyFile(AccessKeys, WatchedFile[KeyFileChange]):
    """Keys in a file, as of the last time it was valid."""

    def __init__(self, path: str, found: KeyFileChange) -> None:
        """``found`` is the result of the first read. Raises ``InvalidArgument`` if it has no keys."""
        if found.problem:
            raise InvalidArgument(f"cannot restrict access: the key file '{path}' {found.problem}. {_FORMAT}")
        AccessKeys.__init__(self, found.keys)
        WatchedFile.__init__(self, path, found)

    def _take(self, found: KeyFileChange) -> None:
        self.problem = found.problem
        if not found.problem:
            self._values = found.keys

    def poll(self) -> KeyFileChange:
        """Read the file. Blocking."""
        return check_key_files(self.path)

    def news(self) -> str:
        """Return the log text after a change: the number of keys, never the keys themselves."""
        count = f"{len(self)} key{'' if len(self) == 1 else 's'}"
        if self.problem:
            return (
                f"the key file '{self.path}' {self.problem}. {_FORMAT} Its last valid content ({count}) stays in force"
            )
        return f"the key file '{self.path}' was read: {count} in force"


class Lock(NamedTuple):
    """Restriction of a category: the required header, and the values it accepts."""

    header: str
    """Spelled as on the command line."""
    keys: AccessKeys

    def opens(self, given: bytes | None) -> bool:
        """Return whether a request with header value ``given`` may pass; None means that it lacks the header."""
        return given is not None and self.keys.include(given)


def parse_key_file(text: bytes) -> KeyFileChange:
    """Parse the text of a key file."""
    lines = [line.strip() for line in text.splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith(b"#"))
    return KeyFileChange(keys, "" if keys else "contains no keys")


def check_key_files(path: str) -> KeyFileChange:
    """Read a key file. Blocking."""
    content = read_content(path, _MAX_FILE_BYTES)
    return KeyFileChange((), content.problem) if content.problem else parse_key_file(content.data)


def open_files(restricted: Iterable[RestrictedKey]) -> dict[str, KeyFile]:
    """Open all key files, by path. Raises ``InvalidArgument`` if one is unusable."""
    paths = {key.file for key in restricted if key.file}
    return {path: KeyFile(path, check_key_files(path)) for path in sorted(paths)}


def locks_of(restricted: Mapping[str, RestrictedKey], files: Mapping[str, AccessKeys]) -> dict[str, Lock]:
    """Return the lock of each restricted category; ``files`` contains all files that ``restricted`` names."""
    return {
        category: Lock(key.header, files[key.file] if key.file else AccessKeys((os.fsencode(key.value),)))
        for category, key in restricted.items()
    }


# Enforcement over HTTP.


def key_refusal(locks: Mapping[str, Lock], category: str, head: RequestHead) -> Reply | None:
    """Return the error reply for a request that lacks the key of its category; None if it may pass."""
    lock = locks.get(category)
    if lock is None:
        return None
    given = head.headers.get(lock.header.lower())
    if lock.opens(None if given is None else header_bytes_of(given)):
        return None
    return reply.error_reply(Restricted(f"This API is restricted, expecting header '{lock.header}'"), reply.PLAIN)


def figures_seen(
    refusal: Reply | None, *, has_key: bool, callers: Callers | None, caller: Callable[[], Caller | None], remedy: str
) -> tuple[Reply | None, str | None]:
    """Return why a request sees no figures of tenants, if so, and the tenant whose figures it sees; None for all.

    ``refusal``: it lacks the key to the figures of all; ``has_key``: there is one, and the request has it. ``callers``
    is None without a policy. A request without the key sees the figures of its own tenant.
    """
    if callers is None or has_key:
        return refusal, None
    try:
        tenant = callers.figures_of(caller(), remedy)
    except NeriteError as error:
        return refusal or reply.error_reply(error), None
    return refusal if tenant is None else None, tenant


def operator_refusal(locks: Mapping[str, Lock], category: str, head: RequestHead, remedy: str) -> Reply | None:
    """Return the error reply for a request about all tenants that lacks the operator's key; None if it may pass.

    That is the key of the category. Without one nobody may, and ``remedy`` says how to set it; an empty ``remedy`` says
    that there are no tenants, and anybody may.
    """
    if category in locks or not remedy:
        return key_refusal(locks, category, head)
    text = f"This concerns all tenants, and nobody may ask for it until there is a key for operators: {remedy}"
    return reply.error_reply(Restricted(text), reply.PLAIN)
