"""From headers to callers: which of the tenants of the policy asks, how much it matters, and how long they wait.

The same names over HTTP and as metadata over gRPC. They are ones that are sent already where there are any: by proxies
(Envoy), by OpenAI's SDKs, and by gRPC clients that repeat a call.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from hmac import compare_digest
from typing import Final, NamedTuple

from nerite.admission.policy import AdmissionPolicy
from nerite.config.options import RestrictedKey
from nerite.config.watched_file import WatchedFile, read_content
from nerite.core.client_text import checked
from nerite.core.errors import InvalidArgument, Restricted
from nerite.core.request import NAME, Caller, IdempotencyKey
from nerite.core.response import Parameter
from nerite.core.text import MAX_VALUE
from nerite.transports.http import reply
from nerite.transports.http.head import RequestHead, header_bytes_of
from nerite.transports.http.reply import Reply

CLASS: Final = "x-nerite-class"
TIMEOUTS: Final = ("x-nerite-timeout-ms", "x-envoy-expected-rq-timeout-ms")
KEYS: Final = ("authorization", "x-api-key")
RETRIES: Final = {"x-stainless-retry-count": 0, "grpc-previous-rpc-attempts": 0, "x-envoy-attempt-count": 1}
"""Each with the number that the first attempt has."""
_RESERVED: Final = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)
"""Names under which nothing is forwarded, beside those that begin with ``triton_``: Triton's list."""
_BEARER: Final = re.compile(r"bearer +", re.IGNORECASE)
_FEW: Final = 2
"""Digits of a time limit that count. What is worked out from headers is kept, and limits differ by microseconds."""

Get = Callable[[str], str | None]
"""Returns the value of a header by its name in lower case."""


class SenderHeaders(NamedTuple):
    """All that the head of an inference says beside what is asked."""

    forwarded: Mapping[str, Parameter]
    """Headers that are passed on to the model as parameters."""
    caller: Caller | None = None
    idempotency_key: IdempotencyKey | None = None


def header_text(name: str, value: str) -> str:
    """Return the value of a header that is used. Raises ``InvalidArgument`` if it is not UTF-8, or its name too long.

    How long a value may be is limited with the head that it is in.
    """
    checked(name, "the name of a header")
    return checked(value, f"header '{name}'", MAX_VALUE)


def forwarded(fields: Iterable[tuple[str, str]], pattern: re.Pattern[str] | None) -> dict[str, Parameter]:
    """Return the headers that ``pattern`` finds, which are passed on to the model as parameters.

    Raises ``InvalidArgument`` for a reserved name, and as ``header_text``.
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
    """Return what reads headers as ``get`` does, and raises ``InvalidArgument`` for one that is not UTF-8."""

    def text(name: str) -> str | None:
        value = get(name)
        return None if value is None else header_text(name, value)

    return text


def key_of(get: Get) -> IdempotencyKey | None:
    """Return what a request is named by, if it is."""
    value = get(NAME)
    return None if value is None else IdempotencyKey(value)


class Callers:
    """Says who asks. One for the server, where a policy is in force."""

    def __init__(self, policy: Callable[[], AdmissionPolicy]) -> None:
        """``policy`` is the one in force. When that changes, what was worked out from headers has to be forgotten."""
        self._policy = policy

    def of(self, get: Get, timeout: float | None = None) -> Caller:
        """Return who sends these headers, and waits for ``timeout`` seconds. Raises ``InvalidArgument``."""
        policy = self._policy()
        tenant = policy.tenant_of(_key(get), get(policy.header) or "" if policy.header else "")
        limits = [1000 * timeout] if timeout is not None else []
        limits += [_number(name, value) for name in TIMEOUTS if (value := get(name)) is not None]
        patience = _rounded(min(limits)) if limits else 0
        return Caller(tenant.name, get(CLASS) or "", patience, _is_retry(get))


def _key(get: Get) -> str:
    """Return the key that comes with a request; as a bearer's, or as it is."""
    for name in KEYS:
        if value := get(name):
            return _BEARER.sub("", value, count=1)
    return ""


def _is_retry(get: Get) -> bool:
    return any(value.isdecimal() and float(value) > RETRIES[name] for name in RETRIES if (value := get(name)))


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise InvalidArgument(f"header '{name}' is '{value}'; it must be a number of milliseconds above 0")
    return number


def _rounded(milliseconds: float) -> int:
    """Return nanoseconds with few digits, never less than was said."""
    nanoseconds = max(math.ceil(milliseconds * 1e6), 1)
    step: int = 10 ** max(len(str(nanoseconds)) - _FEW, 0)
    return -(-nanoseconds // step) * step


# The keys that open restricted categories: given literally, or kept in a file, which may change.

_MAX_SIZE: Final = 64 * 1024
_FORM: Final = "It needs one key a line; empty lines and lines that begin with '#' do not count."


class KeyFileChange(NamedTuple):
    """What a look at a file found: keys, or a problem."""

    keys: tuple[bytes, ...]
    problem: str = ""
    """What is wrong with the file, as the end of a sentence about it; empty where there are keys."""


class AccessKeys:
    """Values of a header, each of which opens a lock."""

    def __init__(self, values: Iterable[bytes]) -> None:
        self._values = tuple(values)

    def __len__(self) -> int:
        return len(self._values)

    def include(self, given: bytes) -> bool:
        """Say whether ``given`` is one of the keys, in a time that does not tell how much of it is right."""
        return sum(compare_digest(value, given) for value in self._values) > 0


class KeyFile(AccessKeys, WatchedFile[KeyFileChange]):
    """The keys in a file, as of the last time that it was in order."""

    def __init__(self, path: str, found: KeyFileChange) -> None:
        """``found`` is what the first look brought. Raises ``InvalidArgument`` if those are no keys."""
        if found.problem:
            raise InvalidArgument(f"cannot restrict access: the key file '{path}' {found.problem}. {_FORM}")
        AccessKeys.__init__(self, found.keys)
        WatchedFile.__init__(self, path, found)

    def _take(self, found: KeyFileChange) -> None:
        self.problem = found.problem
        if not found.problem:
            self._values = found.keys

    def look(self) -> KeyFileChange:
        """Look at the file. Blocks as files do."""
        return check_key_files(self.path)

    def news(self) -> str:
        """Return what to say in the log after a change: how many keys, and never which."""
        count = f"{len(self)} key{'' if len(self) == 1 else 's'}"
        if self.problem:
            return f"the key file '{self.path}' {self.problem}. {_FORM} Its last good content, {count}, stays in force"
        return f"the key file '{self.path}' was read: {count} in force"


class Lock(NamedTuple):
    """What stands before a category: the header that must come with a request, and what it may say."""

    header: str
    """As the command line spells it."""
    keys: AccessKeys

    def opens(self, given: bytes | None) -> bool:
        """Say whether a request may pass whose header has the value ``given``, None if it has none."""
        return given is not None and self.keys.include(given)


def parse_key_file(text: bytes) -> KeyFileChange:
    """Return the keys in the text of a file."""
    lines = [line.strip() for line in text.splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith(b"#"))
    return KeyFileChange(keys, "" if keys else "has no key in it")


def check_key_files(path: str) -> KeyFileChange:
    """Look at a file. Blocks as files do."""
    content = read_content(path, _MAX_SIZE)
    return KeyFileChange((), content.problem) if content.problem else parse_key_file(content.data)


def open_files(restricted: Iterable[RestrictedKey]) -> dict[str, KeyFile]:
    """Return the files that keys are in, by path. Raises ``InvalidArgument`` for one that cannot be used."""
    paths = {key.file for key in restricted if key.file}
    return {path: KeyFile(path, check_key_files(path)) for path in sorted(paths)}


def locks_of(restricted: Mapping[str, RestrictedKey], files: Mapping[str, KeyFile]) -> dict[str, Lock]:
    """Return the lock of each restricted category; ``files`` has all that ``restricted`` names."""
    return {
        category: Lock(key.header, files[key.file] if key.file else AccessKeys((os.fsencode(key.value),)))
        for category, key in restricted.items()
    }


# Who may ask what over HTTP: the key that a restricted category needs.


def key_refusal(locks: Mapping[str, Lock], category: str, head: RequestHead) -> Reply | None:
    """Return the answer to a request that lacks the key of its category, None if it may pass."""
    lock = locks.get(category)
    if lock is None:
        return None
    given = head.headers.get(lock.header.lower())
    if lock.opens(None if given is None else header_bytes_of(given)):
        return None
    return reply.error_reply(Restricted(f"This API is restricted, expecting header '{lock.header}'"), reply.PLAIN)
