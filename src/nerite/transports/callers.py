"""From headers to callers: which of the tenants of the policy asks, how much it matters, and how long they wait.

The same names over HTTP and as metadata over gRPC. They are ones that are sent already where there are any: by proxies
(Envoy), by OpenAI's SDKs, and by gRPC clients that repeat a call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from nerite.core.caller import Caller
from nerite.core.client_text import checked
from nerite.core.errors import InvalidArgument
from nerite.core.idempotency_key import NAME, IdempotencyKey
from nerite.core.response import Parameter
from nerite.core.text import MAX_VALUE
from nerite.scheduling.tokens.policy import Policy

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


class Sender(NamedTuple):
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

    def __init__(self, policy: Callable[[], Policy]) -> None:
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
