"""How the text of a flag's value is read: numbers, booleans, choices.

Triton's readers take the front of a text and leave the rest (``12x`` is 12, ``1e3`` is 1) and let unsigned numbers
wrap; here a number is the whole text and in range. The messages are Triton's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from nerite.cli.errors import BadValue
from nerite.config.options import (
    GRPC_RESTRICTED_PREFIX,
    METRICS_CATEGORY,
    RESTRICTED_CATEGORIES,
    BackendSetting,
    HostPolicy,
    RateLimitResource,
    RestrictedKey,
)

INT32 = (-(2**31), 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)
UINT32 = (0, 2**32 - 1)
UINT64 = (0, 2**64 - 1)

_INTEGER = re.compile(r"[+-]?[0-9]+")
_LEADING = re.compile(
    r"[ \t\n\v\f\r]*[+-]?(0[xX]([0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)([pP][+-]?[0-9]+)?"
    r"|([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[iI][nN][fF]([iI][nN][iI][tT][yY])?|[nN][aA][nN])"
)
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


class ValueKind(NamedTuple):
    """A type of value. ``label`` is what help shows between ``<>``; empty for a flag that takes no value."""

    label: str
    read: Callable[[str], Any]
    """Raises ``BadValue``."""


def integer(text: str, bounds: tuple[int, int] = INT32) -> int:
    """Read a whole number within ``bounds``, both included."""
    if not _INTEGER.fullmatch(text):
        raise BadValue(f"Invalid option value. Got {text}")
    number = int(text) if len(text) < 30 else bounds[1] + 1
    if not bounds[0] <= number <= bounds[1]:
        raise BadValue(f"Provided option value is out of bound. Got {text}")
    return number


def decimal(text: str) -> float:
    """Read a finite decimal number."""
    if not _FLOAT.fullmatch(text):
        raise BadValue(f"Invalid option value. Got {text}")
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise BadValue(f"Provided option value is out of bound. Got {text}")
    return number


def leading_number(text: str) -> float:
    """Read the number that a text begins with as C's ``strtod`` does: behind blanks, and whatever follows it."""
    match = _LEADING.match(text)
    if match is None:
        raise BadValue(f"Invalid option value. Got {text}")
    number = match[0].strip()
    return float.fromhex(number) if "x" in number.lower() else float(number)


def not_negative(text: str) -> float:
    """Read a decimal number that is not below zero."""
    number = decimal(text)
    if number < 0:
        raise BadValue(f"Provided option value is out of bound. Got {text}")
    return number


def boolean(text: str) -> bool:
    """Read true/on/1 or false/off/0, in any case."""
    match text.lower():
        case "true" | "on" | "1":
            return True
        case "false" | "off" | "0":
            return False
    raise BadValue(f"invalid value for bool option: {text}")


def verbosity(text: str) -> int:
    """Read a log level: a number, or true and false for 1 and 0. Negative is 0."""
    match text.lower():
        case "true":
            return 1
        case "false":
            return 0
    return max(0, integer(text))


def choice(flag: str, values: Sequence[str], *, any_case: bool = True) -> ValueKind:
    """Return the kind of a value that is one of ``values``; ``flag`` is how Triton names it in the refusal."""

    def read(text: str) -> str:
        value = text.lower() if any_case else text
        if value not in values:
            raise BadValue(f"invalid argument for --{flag}")
        return value

    return ValueKind("|".join(values), read)


def at_least(least: int, refusal: str, bounds: tuple[int, int] = INT32) -> ValueKind:
    """Return the kind of a number that must reach ``least``, or else ``refusal``."""

    def read(text: str) -> int:
        number = integer(text, bounds)
        if number < least:
            raise BadValue(refusal)
        return number

    return ValueKind("integer", read)


def _clamped(least: int) -> ValueKind:
    return ValueKind("integer", lambda text: max(least, integer(text)))


def _handler_threads(text: str) -> int:
    number = integer(text)
    if not 2 <= number <= 128:
        raise BadValue("invalid argument for --grpc_infer_thread_count. Must be in the range 2 to 128.")
    return number


def _config_name(text: str) -> str:
    if not text:
        raise BadValue("Error: empty argument for --model-config-name")
    return text


def _pattern(text: str) -> re.Pattern[str] | None:
    """Compile a pattern of header names: in any case, unless it starts with ``(?-i)``."""
    sensitive = text.startswith("(?-i)")
    try:
        return re.compile(text.removeprefix("(?-i)"), 0 if sensitive else re.IGNORECASE) if text else None
    except re.error as error:
        raise BadValue(f"invalid regular expression '{text}': {error}") from None


NOTHING = ValueKind("", boolean)
"""No value on the command line; a boolean in the environment or a file."""
TEXT = ValueKind("string", str)
BOOLEAN = ValueKind("boolean", boolean)
INTEGER = ValueKind("integer", integer)
COUNT = _clamped(0)
"""A number that counts something: below zero is zero, as Triton has it."""
AT_LEAST_ONE = _clamped(1)
BYTES = ValueKind("integer", lambda text: integer(text, INT64))
PORT = ValueKind("integer", lambda text: integer(text, (0, 65535)))
FLOAT = ValueKind("float", decimal)
VERBOSITY = ValueKind("integer", verbosity)
HANDLER_THREADS = ValueKind("integer", _handler_threads)
CONFIG_NAME = ValueKind("string", _config_name)
PATTERN = ValueKind("regex", _pattern)

# Values made of parts: ``backend,setting=value``, ``categories:header=value``, ``device:bytes`` and the like.
#
# Each reader returns a container, so that what a repeated flag brings is joined with what it brought before: tuples
# are appended, mappings merged. The messages are Triton's.

_V = TypeVar("_V")


def union(before: tuple[str, ...], now: tuple[str, ...]) -> tuple[str, ...]:
    """Join names as Triton's ``std::set`` does: sorted, no duplicates."""
    return tuple(sorted({*before, *now}))


def first_wins(before: Mapping[int, _V], now: Mapping[int, _V]) -> dict[int, _V]:
    """Join per-device values; the first one given for a device stays."""
    return {**now, **before}


def last_wins(before: Mapping[Any, _V], now: Mapping[Any, _V]) -> dict[Any, _V]:
    """Join per-device or per-setting values; the last one given stays."""
    return {**before, **now}


def _three_parts(text: str, timings: tuple[str, str], refusal: str) -> tuple[str, str, str]:
    first, found, rest = text.partition(timings[0])
    second, found_too, third = rest.partition(timings[1])
    if not (found and found_too and first and second and third):
        raise BadValue(refusal)
    return first, second, third


def _setting(text: str, refusal: str) -> tuple[str, str, str]:
    """Take ``name,setting=value`` or ``setting=value`` apart; the name may be empty, the rest may not."""
    # A comma in the value of ``setting=value`` is taken for the one after the name, unless no "=" follows it:
    # that is how Triton reads it.
    name, comma, rest = text.partition(",")
    if not comma:
        name, rest = "", text
    setting, equals, value = rest.partition("=")
    if not (equals and setting and value):
        raise BadValue(refusal)
    return name, setting, value


def backend_config(text: str) -> tuple[BackendSetting, ...]:
    """Read ``[backend,]setting=value``."""
    if text.startswith(","):
        raise BadValue(
            "No backend specified. --backend-config option format is <backend name>,<setting>=<value> or "
            f"<setting>=<value>. Got {text}"
        )
    refusal = f"--backend-config option format is '<backend name>,<setting>=<value>'. Got {text}"
    return (BackendSetting(*_setting(text, refusal)),)


def cache_config(text: str) -> tuple[tuple[str, str, str], ...]:
    """Read ``cache,setting=value``."""
    if text.find(",") < 1:
        raise BadValue(
            f"No cache specified. --cache-config option format is <cache name>,<setting>=<value>. Got {text}"
        )
    return (_setting(text, f"--cache-config option format is '<cache name>,<setting>=<value>'. Got {text}"),)


def trace_config(text: str) -> tuple[tuple[str, str, str], ...]:
    """Read ``[mode,]setting=value``; what the settings mean is worked out when all are known."""
    if text.startswith(","):
        raise BadValue(
            "No trace mode specified. --trace-config option format is <trace mode>,<setting>=<value> or "
            f"<setting>=<value>. Got {text}"
        )
    mode, comma, _ = text.partition(",")
    if comma:
        mode = trace_mode(mode)
    refusal = f"--trace-config option format is '<trace mode>,<setting>=<value>'. Got {text}"
    _, setting, value = _setting(text, refusal)
    return ((mode if comma else "", setting, value),)


def trace_mode(text: str) -> str:
    """Read the name of a trace mode, in any case."""
    if text.lower() not in ("triton", "opentelemetry"):
        raise BadValue(
            f'invalid value for trace mode option: {text.lower()}. Available options are "triton" and "opentelemetry"'
        )
    return text.lower()


def trace_level(text: str) -> tuple[str, ...]:
    """Read a trace level, in any case. Triton has many names for the same two."""
    match text.lower():
        case "false" | "off":
            return ("OFF",)
        case "true" | "on" | "min" | "max" | "timestamps":
            return ("TIMESTAMPS",)
        case "tensors":
            return ("TENSORS",)
    raise BadValue(f"invalid value for trace level option: {text.lower()}")


def _quantiles(text: str) -> tuple[tuple[float, float], ...]:
    pairs = []
    for pair in filter(None, text.split(",")):
        quantile, colon, error = pair.partition(":")
        if not colon:
            raise BadValue(f"Invalid option: [{pair}]. No ':' delimiter found. Expected format is <quantile>:<error>")
        number = leading_number(quantile)
        if not 0 <= number <= 1:
            raise BadValue(f"a quantile is a number from 0 to 1. Got {pair}")
        pairs.append((number, leading_number(error)))
    return tuple(pairs)


METRICS_SETTINGS: Mapping[str, Callable[[str], object]] = {
    "counter_latencies": boolean,
    "histogram_latencies": boolean,
    "summary_latencies": boolean,
    "summary_quantiles": _quantiles,
    "stage_histograms": boolean,
}


def metrics_config(text: str) -> dict[str, object]:
    """Read ``setting=value``. The value of a setting that is not known stays text."""
    setting, equals, value = text.partition("=")
    if not (equals and setting and value) or "," in setting:
        raise BadValue(f"--metrics-config option format is <setting>=<value>. Got {text}")
    try:
        return {setting: METRICS_SETTINGS.get(setting, str)(value)}
    except BadValue as error:
        raise BadValue(str(error), within=setting) from None


def restricted(
    flag: str, noun: str, prefix: str, offered: Sequence[str]
) -> tuple[ValueKind, Callable[[Any, Any], Any]]:
    """Return the kind of ``categories:header=value``, and the join that lets a category be restricted once."""
    Restricted = dict[str, RestrictedKey]

    def merge(before: Restricted, now: Restricted) -> Restricted:
        for category in now:
            if category in before:
                raise BadValue(f"restricted {noun} '{category}' can not be specified in multiple config groups")
        return {**before, **now}

    def read(text: str) -> Restricted:
        refusal = f"--{flag} option format is '<config name>:<setting>=<value>'. Got {text}"
        categories, header, value = _three_parts(text, (":", "="), refusal)
        if value == "@":
            raise BadValue(f"{refusal}. Behind '@' stands the path of a file with the keys")
        keys: Restricted = {}
        for category in categories.split(","):
            if category not in offered:
                raise BadValue(f"unknown restricted {noun} '{category}' ")
            keys = merge(keys, {category: RestrictedKey(prefix + header, value)})
        return keys

    return ValueKind("categories:header=[@]value", read), merge


HTTP_RESTRICTED, JOIN_HTTP_RESTRICTED = restricted(
    "http-restricted-api", "api", "", (*RESTRICTED_CATEGORIES, METRICS_CATEGORY)
)
GRPC_RESTRICTED, JOIN_GRPC_RESTRICTED = restricted(
    "grpc-restricted-protocol", "protocol", GRPC_RESTRICTED_PREFIX, RESTRICTED_CATEGORIES
)


_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[^\s/:?#@,*\[\]]+)(:[0-9]{1,5})?")
_HOST = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
_USUAL_PORTS = {"http": ":80", "https": ":443"}


def cors_origin(text: str) -> tuple[str, ...]:
    """Read an origin, and write it as browsers do: in lower case, without the port that its scheme has anyway."""
    if text == "*":
        return ("*",)
    match = _ORIGIN.fullmatch(text.lower())
    if match is None:
        raise BadValue(
            f"an origin is <scheme>://<host> or <scheme>://<host>:<port> with nothing behind it, or *. Got {text}"
        )
    scheme, host, port = match.groups("")
    return (f"{scheme}://{host}{'' if port == _USUAL_PORTS.get(scheme) else port}",)


def host_name(text: str) -> tuple[str, ...]:
    """Read the name of a host as ``Host`` has it, in lower case and without a port."""
    if text != "*" and not _HOST.fullmatch(text):
        raise BadValue(f"a host is a name without scheme and port, such as models.example.com, or *. Got {text}")
    return (text.lower().removesuffix("."),)


def host_policy(text: str) -> tuple[HostPolicy, ...]:
    """Read ``policy,setting=value``."""
    refusal = f"--host-policy option format is '<policy name>,<setting>=<value>'. Got {text}"
    return (HostPolicy(*_three_parts(text, (",", "="), refusal)),)


def rate_limit_resource(text: str) -> tuple[RateLimitResource, ...]:
    """Read ``name:count`` or ``name:count:device``."""
    name, *numbers = text.split(":")
    if len(numbers) not in (1, 2):
        raise BadValue(
            "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
            f"'<resource_name>:<count>'. Got {text}"
        )
    return (RateLimitResource(name, *map(integer, numbers)),)


def _pair(text: str, mark: str) -> tuple[str, str]:
    first, found, second = text.partition(mark)
    if not found:
        raise BadValue(
            "Cannot parse pair option due to incorrect number of inputs."
            f"--<pair option> argument requires format <first>{mark}<second>. Found: {text}"
        )
    return first, second


def port_range(text: str) -> tuple[int, int]:
    """Read ``first-last``."""
    first, last = _pair(text, "-")
    return integer(first), integer(last)


def device_bytes(text: str) -> dict[int, int]:
    """Read ``device:bytes``."""
    device, size = _pair(text, ":")
    return {integer(device, INT32): integer(size, UINT64)}


def device_fraction(text: str) -> dict[int, float]:
    """Read ``device:fraction``."""
    device, fraction = _pair(text, ":")
    return {integer(device): decimal(fraction)}
