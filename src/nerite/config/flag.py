"""A command-line flag of the server, and the readers that turn the text of a flag into a value.

Triton's readers take the start of a text and ignore the rest (``12x`` is 12, ``1e3`` is 1) and let unsigned numbers
wrap around; here a number must be the whole text and in range. Error texts are Triton's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from nerite.core.sizes import size_of


class BadValue(ValueError):
    """A value that a flag does not accept. ``str()`` is Triton's text for it.

    ``within`` names the invalid part of a compound value, as Triton does: ``--trace-config rate``.
    """

    def __init__(self, text: str, within: str = "") -> None:
        super().__init__(text)
        self.within = within


class ValueKind(NamedTuple):
    """A type of value. ``label`` is what help shows between ``<>``; empty for a flag that takes no value."""

    label: str
    read: Callable[[str], Any]
    """Raises ``BadValue``."""


def value_kind(label: str) -> Callable[[Callable[[str], Any]], ValueKind]:
    """Turn a function that reads a value into the kind of that value."""
    return partial(ValueKind, label)


OF_FIELD = ValueKind("", str)
"""Stands for the kind that the type of the annotated field implies."""
NERITE_GROUP = "Nerite"


@dataclass(frozen=True)
class Flag:
    """A flag of the command line. Annotates the field of the options that it sets, or stands alone."""

    name: str
    """Without the dashes. ``{}`` in the flags of ``TlsOptions`` is replaced by the name of the port."""
    help: str
    kind: ValueKind = OF_FIELD
    join: Callable[[Any, Any], Any] | None = None
    """Joins the values of a repeated flag, earlier value first. None: the last value wins."""
    group: str = ""
    """Heading of the flag in the help. Empty on a field: the heading of the group of options."""
    default: str = ""
    """Default as the help shows it, where that is not simply the default of the field."""
    no_effect: str = ""
    """Why the flag has no effect in this version; empty for a flag that works. Its values are validated regardless."""
    deprecated: str = ""
    """Triton's warning when the flag is used; ``{value}`` is replaced by the value."""
    stands_for: str = ""
    """Name of the flag that this one is another name of."""
    field: str = ""
    """Dotted path of the field of ``ServerOptions`` that the flag sets; empty for a flag that stands alone."""

    @property
    def key(self) -> str:
        """Name under which the value is kept."""
        return self.stands_for or self.name

    @property
    def environment(self) -> str:
        """Environment variable that sets the flag."""
        return "NERITE_" + self.name.upper().replace("-", "_")

    @property
    def ours(self) -> bool:
        """True if Triton has no such flag."""
        return self.group == NERITE_GROUP


nerite_flag = partial(Flag, group=NERITE_GROUP)
"""A flag that Triton does not have."""

# Numbers, booleans and choices.

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


def integer(text: str, bounds: tuple[int, int] = INT32) -> int:
    """Parse an integer within ``bounds``, both included."""
    if not _INTEGER.fullmatch(text):
        raise BadValue(f"Invalid option value. Got {text}")
    number = int(text) if len(text) < 30 else bounds[1] + 1
    if not bounds[0] <= number <= bounds[1]:
        raise BadValue(f"Provided option value is out of bound. Got {text}")
    return number


def decimal(text: str, lowest: float = -math.inf) -> float:
    """Parse a finite decimal number that is not below ``lowest``."""
    if not _FLOAT.fullmatch(text):
        raise BadValue(f"Invalid option value. Got {text}")
    number = float(text)
    if math.isinf(number) or number < lowest:
        raise BadValue(f"Provided option value is out of bound. Got {text}")
    return number


def _leading_number(text: str) -> float:
    """Parse the number that a text starts with as C's ``strtod`` does: skip blanks, ignore what follows it."""
    match = _LEADING.match(text)
    if match is None:
        raise BadValue(f"Invalid option value. Got {text}")
    number = match[0].strip()
    return float.fromhex(number) if "x" in number.lower() else float(number)


def boolean(text: str) -> bool:
    """Parse true/on/1 or false/off/0, in any case."""
    match text.lower():
        case "true" | "on" | "1":
            return True
        case "false" | "off" | "0":
            return False
    raise BadValue(f"invalid value for bool option: {text}")


@value_kind("integer")
def verbosity(text: str) -> int:
    """Parse a log level: a number, or true and false for 1 and 0. Negative is 0."""
    words = {"true": 1, "false": 0}
    return words[text.lower()] if text.lower() in words else max(0, integer(text))


def choice(flag: str, values: Sequence[str], *, any_case: bool = True) -> ValueKind:
    """Return the kind of a value that is one of ``values``; ``flag`` is Triton's name for it in the error."""

    def read(text: str) -> str:
        value = text.lower() if any_case else text
        if value not in values:
            raise BadValue(f"invalid argument for --{flag}")
        return value

    return ValueKind("|".join(values), read)


def in_range(least: int, most: float, error: str, bounds: tuple[int, int] = INT32) -> ValueKind:
    """Return the kind of an integer from ``least`` to ``most``; any other raises ``error``."""

    def read(text: str) -> int:
        number = integer(text, bounds)
        if not least <= number <= most:
            raise BadValue(error)
        return number

    return ValueKind("integer", read)


def positive(flag: str, bounds: tuple[int, int] = INT32) -> ValueKind:
    """Return the kind of an integer of 1 or more."""
    return in_range(1, math.inf, f"Error: --{flag} must be greater than 0.", bounds)


def not_negative(flag: str, bounds: tuple[int, int] = INT32) -> ValueKind:
    """Return the kind of an integer of 0 or more."""
    return in_range(0, math.inf, f"Error: --{flag} must not be negative.", bounds)


@value_kind("string")
def config_name(text: str) -> str:
    """Read a name that is not empty."""
    if not text:
        raise BadValue("Error: empty argument for --model-config-name")
    return text


@value_kind("regex")
def pattern(text: str) -> re.Pattern[str] | None:
    """Compile a pattern of header names: case-insensitive, unless it starts with ``(?-i)``."""
    sensitive = text.startswith("(?-i)")
    try:
        return re.compile(text.removeprefix("(?-i)"), 0 if sensitive else re.IGNORECASE) if text else None
    except re.error as error:
        raise BadValue(f"invalid regular expression '{text}': {error}") from None


def memory_size(text: str) -> int:
    """Return the bytes of a size of memory, such as ``16GiB``. Raises ``BadValue``."""
    try:
        return size_of(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise BadValue(f"{error}. Got {text}") from None


SWITCH = ValueKind("", boolean)
"""No value on the command line; a boolean in the environment or a file."""
SWITCH_OFF = ValueKind("", lambda text: not boolean(text))
"""Like ``SWITCH``, for a flag that switches its field off."""
TEXT = ValueKind("string", str)
BOOLEAN = ValueKind("boolean", boolean)
INTEGER = ValueKind("integer", integer)
COUNT = ValueKind("integer", lambda text: max(0, integer(text)))
"""A negative number means 0, as in Triton."""
AT_LEAST_ONE = ValueKind("integer", lambda text: max(1, integer(text)))
BYTES = ValueKind("integer", lambda text: integer(text, INT64))
PORT = ValueKind("integer", lambda text: integer(text, (0, 65535)))
SIZE = ValueKind("size", lambda text: memory_size(text))
FLOAT = ValueKind("float", decimal)
SECONDS = ValueKind("float", lambda text: decimal(text, 0))
PATHS = ValueKind("path", lambda text: (text,))
NAMES = ValueKind("name", lambda text: (text,))

MAX_FRONTS = 64
AUTO = 0
"""Stands for ``auto``."""


@value_kind("integer|auto")
def front_processes(text: str) -> int:
    """Read a number of front processes; ``auto`` is ``AUTO``."""
    if text == "auto":
        return AUTO
    try:
        return integer(text, (1, MAX_FRONTS))
    except BadValue as error:
        raise BadValue(f"{error}. Give a number from 1, for a single process, to {MAX_FRONTS}, or 'auto'") from None


# Compound values: ``backend,setting=value``, ``categories:header=value``, ``device:bytes`` and the like.
#
# Each reader returns a container, so that the values of a repeated flag can be joined: tuples are appended, mappings
# merged.

_V = TypeVar("_V")


def union(before: tuple[str, ...], now: tuple[str, ...]) -> tuple[str, ...]:
    """Join names as Triton's ``std::set`` does: sorted, no duplicates."""
    return tuple(sorted({*before, *now}))


def first_wins(before: Mapping[Any, _V], now: Mapping[Any, _V]) -> dict[Any, _V]:
    """Join mappings; of two values for one key the first is kept."""
    return {**now, **before}


def last_wins(before: Mapping[Any, _V], now: Mapping[Any, _V]) -> dict[Any, _V]:
    """Join mappings; of two values for one key the last is kept."""
    return {**before, **now}


class RestrictedKey(NamedTuple):
    """The header (or metadata key, prefix included) that opens a category, and the value it must have."""

    header: str
    value: str
    """After ``@`` the path of a file with the accepted values, one per line."""

    @property
    def file(self) -> str:
        """Path of the file with the accepted values; empty if the value itself is given."""
        return self.value[1:] if self.value.startswith("@") else ""


class BackendSetting(NamedTuple):
    """One ``--backend-config``; an empty ``backend`` stands for all backends."""

    backend: str
    name: str
    value: str


class RateLimitResource(NamedTuple):
    """One ``--rate-limit-resource``; ``device`` -1 stands for each device, and for the global resource."""

    name: str
    amount: int
    device: int = -1


class HostPolicy(NamedTuple):
    """One ``--host-policy``."""

    policy: str
    setting: str
    value: str


def _split(text: str, mark: str, error: str, *, named: bool = True) -> tuple[str, str, str]:
    """Split ``name,setting=value`` at ``mark`` and ``=``. Unless ``named``, the name and the mark may be left out."""
    # The first mark ends the name even if it follows the "=", as in Triton.
    name, found, rest = text.partition(mark)
    if not found:
        name, rest = "", text
    setting, equals, value = rest.partition("=")
    if not (equals and setting and value) or (named and not name):
        raise BadValue(error)
    return name, setting, value


def _config(flag: str, noun: str, name: str, text: str, *, named: bool = False) -> tuple[str, str, str]:
    """Split the value of ``--backend-config``, ``--cache-config`` or ``--trace-config``."""
    form = f"{name},<setting>=<value>"
    if text.startswith(",") or (named and "," not in text):
        forms = form if named else f"{form} or <setting>=<value>"
        raise BadValue(f"No {noun} specified. --{flag} option format is {forms}. Got {text}")
    return _split(text, ",", f"--{flag} option format is '{form}'. Got {text}", named=named)


@value_kind("[backend,]setting=value")
def backend_config(text: str) -> tuple[BackendSetting, ...]:
    """Read a setting of one backend or of all."""
    return (BackendSetting(*_config("backend-config", "backend", "<backend name>", text)),)


@value_kind("cache,setting=value")
def cache_config(text: str) -> tuple[tuple[str, str, str], ...]:
    """Read a setting of a cache."""
    return (_config("cache-config", "cache", "<cache name>", text, named=True),)


@value_kind("[mode,]setting=value")
def trace_config(text: str) -> tuple[tuple[str, str, str], ...]:
    """Parse ``[mode,]setting=value``. The value stays text until the mode is known."""
    mode, comma, _ = text.partition(",")
    if mode and comma:
        mode = trace_mode(mode)
    name, setting, value = _config("trace-config", "trace mode", "<trace mode>", text)
    return ((mode if name else "", setting, value),)


def trace_mode(text: str) -> str:
    """Parse the name of a trace mode, in any case."""
    if text.lower() not in ("triton", "opentelemetry"):
        raise BadValue(
            f'invalid value for trace mode option: {text.lower()}. Available options are "triton" and "opentelemetry"'
        )
    return text.lower()


@value_kind("OFF|TIMESTAMPS|TENSORS")
def trace_level(text: str) -> tuple[str, ...]:
    """Parse a trace level, in any case. Triton has several names for each."""
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
        number = _leading_number(quantile)
        if not 0 <= number <= 1:
            raise BadValue(f"a quantile is a number from 0 to 1. Got {pair}")
        pairs.append((number, _leading_number(error)))
    return tuple(pairs)


METRICS_SETTINGS: Mapping[str, Callable[[str], object]] = {
    "counter_latencies": boolean,
    "histogram_latencies": boolean,
    "summary_latencies": boolean,
    "summary_quantiles": _quantiles,
    "stage_histograms": boolean,
}
"""Settings of ``--metrics-config``, which are fields of ``MetricsOptions``."""


@value_kind("setting=value")
def metrics_config(text: str) -> dict[str, object]:
    """Parse ``setting=value``. The value of an unknown setting stays text."""
    setting, equals, value = text.partition("=")
    if not (equals and setting and value) or "," in setting:
        raise BadValue(f"--metrics-config option format is <setting>=<value>. Got {text}")
    try:
        return {setting: METRICS_SETTINGS.get(setting, str)(value)}
    except BadValue as error:
        raise BadValue(str(error), within=setting) from None


_Keys = Mapping[str, RestrictedKey]


def restricted_join(noun: str) -> Callable[[_Keys, _Keys], dict[str, RestrictedKey]]:
    """Return the join that rejects a category which is restricted twice."""

    def join(before: _Keys, now: _Keys) -> dict[str, RestrictedKey]:
        for category in now:
            if category in before:
                raise BadValue(f"restricted {noun} '{category}' can not be specified in multiple config groups")
        return {**before, **now}

    return join


def restricted(flag: str, noun: str, prefix: str, offered: Sequence[str]) -> ValueKind:
    """Return the kind of ``categories:header=value``: a dictionary from category to key."""

    def read(text: str) -> dict[str, RestrictedKey]:
        error = f"--{flag} option format is '<config name>:<setting>=<value>'. Got {text}"
        categories, header, value = _split(text, ":", error)
        if value == "@":
            raise BadValue(f"{error}. Behind '@' stands the path of a file with the keys")
        keys: dict[str, RestrictedKey] = {}
        for category in categories.split(","):
            if category not in offered:
                raise BadValue(f"unknown restricted {noun} '{category}' ")
            keys = restricted_join(noun)(keys, {category: RestrictedKey(prefix + header, value)})
        return keys

    return ValueKind("categories:header=[@]value", read)


_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[^\s/:?#@,*\[\]]+)(:[0-9]{1,5})?")
_HOST = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


@value_kind("origin")
def cors_origin(text: str) -> tuple[str, ...]:
    """Parse an origin into the form that browsers send: lower case, without the default port of its scheme."""
    if text == "*":
        return ("*",)
    match = _ORIGIN.fullmatch(text.lower())
    if match is None:
        raise BadValue(
            f"an origin is <scheme>://<host> or <scheme>://<host>:<port> with nothing behind it, or *. Got {text}"
        )
    scheme, host, port = match.groups("")
    return (f"{scheme}://{host}{'' if port == _DEFAULT_PORTS.get(scheme) else port}",)


@value_kind("name")
def host_name(text: str) -> tuple[str, ...]:
    """Parse the name of a host as it appears in ``Host``, in lower case and without a port."""
    if text != "*" and not _HOST.fullmatch(text):
        raise BadValue(f"a host is a name without scheme and port, such as models.example.com, or *. Got {text}")
    return (text.lower().removesuffix("."),)


@value_kind("pattern=model")
def model_alias(text: str) -> dict[str, str]:
    """Read another name of a model."""
    pattern, found, model = text.partition("=")
    if not found or not pattern or not model:
        raise BadValue(f"--model-alias option format is '<pattern>=<model>', such as claude-*=chat. Got {text}")
    return {pattern: model}


@value_kind("model=version")
def model_baseline(text: str) -> dict[str, str]:
    """Read the version of a model."""
    model, _, version = text.rpartition("=")
    if not model or not re.fullmatch("[1-9][0-9]{0,17}", version):
        raise BadValue(f"--rollout-baseline option format is '<model>=<version>', such as resnet=1. Got {text}")
    return {model: version}


@value_kind("policy,setting=value")
def host_policy(text: str) -> tuple[HostPolicy, ...]:
    """Read a setting of a host policy."""
    error = f"--host-policy option format is '<policy name>,<setting>=<value>'. Got {text}"
    return (HostPolicy(*_split(text, ",", error)),)


@value_kind("name:count[:device]")
def rate_limit_resource(text: str) -> tuple[RateLimitResource, ...]:
    """Read an amount of a resource, in total or on one device."""
    name, *numbers = text.split(":")
    if len(numbers) not in (1, 2):
        raise BadValue(
            "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
            f"'<resource_name>:<count>'. Got {text}"
        )
    return (RateLimitResource(name, *map(integer, numbers)),)


def _pair(label: str, mark: str, read: Callable[[str, str], Any]) -> ValueKind:
    """Return the kind of two values with ``mark`` between them."""

    def read_pair(text: str) -> Any:
        first, found, second = text.partition(mark)
        if not found:
            raise BadValue(
                "Cannot parse pair option due to incorrect number of inputs."
                f"--<pair option> argument requires format <first>{mark}<second>. Found: {text}"
            )
        return read(first, second)

    return ValueKind(label, read_pair)


PORT_RANGE = _pair("first-last", "-", lambda first, last: (integer(first), integer(last)))
DEVICE_BYTES = _pair("device:bytes", ":", lambda device, size: {integer(device): integer(size, UINT64)})
DEVICE_FRACTION = _pair("device:fraction", ":", lambda device, fraction: {integer(device): decimal(fraction)})
