"""What a rollout is to do: versions, steps, gates and limits.

It is read from a request, from ``rollout.toml``, or from a cluster file, all with the same keys: they are the flags of
``nerite rollout start`` without their dashes; a repeated flag is a list.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv6Address
from itertools import pairwise
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from nerite.config.mistake import nearest
from nerite.config.sticky_key import sticky_keys
from nerite.core.durations import duration_of, duration_text
from nerite.core.errors import InvalidArgument
from nerite.core.text import quoted_text, text_error
from nerite.judge.gates import parse_gate

MAX_SPEC: Final = 64 * 1024
"""Bytes of a request or a file."""
_MAX_LIST: Final = 32
"""Steps of a rollout, and gates."""
_MAX_TEXT: Final = 1024
_MAX_REQUESTS: Final = 10**9
_PROMOTION: Final = 100.0
"""Percent of the last step."""
_VERSION: Final = re.compile("[1-9][0-9]{0,17}")
_URL_TEXT: Final = re.compile(r"""[!#-;=?-\[\]_a-z~]+""")
"""Printable characters of ASCII, without those that no part of a URL may contain."""
_LABEL: Final = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_MAX_HOST: Final = 253


class AtDeadline(StrEnum):
    """What happens at the deadline, if the evidence is not sufficient by then."""

    STAY = "stay"
    PROMOTE = "promote"
    ROLL_BACK = "rollback"


class WhenLost(StrEnum):
    """What happens while a replica cannot be reached, or refuses the rollout."""

    HOLD = "hold"
    """Stay at the step. Harm is still rolled back."""
    GO_ON = "go-on"
    ROLL_BACK = "rollback"
    """Roll back if it lasts for a minute."""


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """What a rollout is to do. Durations are in seconds."""

    to: str
    """The candidate: a version of the model."""
    baseline: str = ""
    """The version to compare with; empty: the one that serves."""
    steps: tuple[float, ...] = (1.0, 5.0, 25.0, 50.0, _PROMOTION)
    """Percent of the requests that the candidate gets in each step. The last, 100, is the promotion."""
    shadow: float = 0.0
    """Percent of the requests that are also sent to the candidate before the first step; 0 for no such step."""
    hold: float = 300.0
    """Minimum duration of a step."""
    requests: int = 20
    """Minimum number of requests that the candidate has answered in a step."""
    deadline: float = 7200.0
    """Time under way after which ``at_deadline`` applies; 0: never."""
    at_deadline: AtDeadline = AtDeadline.STAY
    gates: tuple[str, ...] = ("errors", "p99")
    sticky: str = ""
    """What keeps a caller on one version; empty: each request is assigned at random, but for sequences."""
    webhook: str = ""
    """URL that every decision is posted to."""
    record: bool = False
    """Record what the judge is given, for ``nerite rollout replay``."""
    force: bool = False
    """Start in spite of differences between the versions that block a rollout."""

    def as_json(self) -> dict[str, Any]:
        """Return the specification under its keys; ``spec_of`` reads it."""
        return {
            "to": self.to,
            "from": self.baseline,
            "steps": list(self.steps),
            "shadow": f"{self.shadow:g}%" if self.shadow else "",
            "hold": duration_text(self.hold),
            "requests": self.requests,
            "deadline": duration_text(self.deadline),
            "at-deadline": str(self.at_deadline),
            "gate": list(self.gates),
            "sticky": self.sticky,
            "webhook": self.webhook,
            "record": self.record,
            "force": self.force,
        }


def percents_of(value: object) -> tuple[float, ...]:
    """Return steps: of a list of numbers, or of ``1,5,25,50,100``. Raises ``ValueError``."""
    example = "as in 1,5,25,50,100"
    if isinstance(value, str):
        value = [part.strip().removesuffix("%") for part in value.split(",")]
    if not isinstance(value, list) or not value or len(value) > _MAX_LIST:
        raise ValueError(f"must be 1 to {_MAX_LIST} percentages, {example}")
    numbers = []
    for each in value:
        try:
            number = float(each) if isinstance(each, str | int | float) and not isinstance(each, bool) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not 0 < number <= _PROMOTION:
            raise ValueError(f"must be percentages above 0 and up to 100, {example}")
        numbers.append(number)
    if any(one >= other for one, other in pairwise(numbers)):
        raise ValueError(f"must increase, {example}")
    if numbers[-1] != _PROMOTION:
        raise ValueError(f"must end with 100, which is the promotion, {example}. Pause a rollout to keep it at a step")
    if len(numbers) == 1:
        raise ValueError(f"must have a step below 100, in which both versions are compared, {example}")
    return tuple(numbers)


def _percent(value: object) -> float:
    if value == "":
        return 0.0
    text = value.strip().removesuffix("%") if isinstance(value, str) else value
    try:
        number = float(text) if isinstance(text, str | int | float) and not isinstance(text, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not 0 < number <= _PROMOTION:
        raise ValueError("must be a percentage above 0 and up to 100, as in 10%")
    return number


def _version(value: object) -> str:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not _VERSION.fullmatch(text):
        raise ValueError("must be the number of a version, as in 2")
    return text


def _baseline(value: object) -> str:
    return "" if value == "" else _version(value)


def _count(value: object) -> int:
    if isinstance(value, str) and re.fullmatch("[0-9]{1,10}", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_REQUESTS:
        raise ValueError("must be a number of requests, 0 or more")
    return value


def _at_deadline(value: object) -> AtDeadline:
    if value not in tuple(AtDeadline):
        raise ValueError(f"must be one of {', '.join(AtDeadline)}")
    return AtDeadline(str(value))


def _gates(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not 1 <= len(value) <= _MAX_LIST:
        raise ValueError(f'must be a list of 1 to {_MAX_LIST} gates, as in ["errors", "p99=+10%"]')
    texts = tuple(_text(each) for each in value)
    if len({parse_gate(text) for text in texts}) < len(texts):
        raise ValueError("has the same gate twice")
    return texts


def _sticky(value: object) -> str:
    text = _text(value)
    sticky_keys(text)
    return text


def _text(value: object) -> str:
    if not isinstance(value, str) or text_error(value, _MAX_TEXT) is not None:
        raise ValueError(f"must be a string of at most {_MAX_TEXT} characters")
    return value


def _url(value: object) -> str:
    text = _text(value)
    if text and (mistake := _mistake_in_url(text)):
        raise ValueError(f"must be a URL, as in https://hooks.example.com/rollouts: {mistake}")
    return text


def _mistake_in_url(text: str) -> str:
    """Return what is wrong with the URL of a receiver; empty for nothing."""
    if not _URL_TEXT.fullmatch(text):
        return "it has a character that must be written as %XX; hosts of other alphabets are written as xn--…"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
        if "[" in parts.netloc:
            IPv6Address(host.partition("%")[0])
    except ValueError:
        return "its host or its port is invalid"
    if parts.scheme not in ("http", "https"):
        return "it must begin with http:// or https://"
    if port == 0:
        return "its port is 0"
    labels = host.removesuffix(".").split(".")
    if "[" not in parts.netloc and (len(host) > _MAX_HOST or not all(map(_LABEL.fullmatch, labels))):
        return (
            f"'{quoted_text(host)}' is no host: the parts between its dots must be 1 to 63 letters, digits or hyphens"
        )
    return ""


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


class _Key(NamedTuple):
    field: str
    read: Callable[[object], Any]
    """Raises ``ValueError`` or ``InvalidArgument`` with the end of a sentence about the value."""


_KEYS: Final[Mapping[str, _Key]] = {
    "to": _Key("to", _version),
    "from": _Key("baseline", _baseline),
    "steps": _Key("steps", percents_of),
    "shadow": _Key("shadow", _percent),
    "hold": _Key("hold", duration_of),
    "requests": _Key("requests", _count),
    "deadline": _Key("deadline", duration_of),
    "at-deadline": _Key("at_deadline", _at_deadline),
    "gate": _Key("gates", _gates),
    "sticky": _Key("sticky", _sticky),
    "webhook": _Key("webhook", _url),
    "record": _Key("record", _switch),
    "force": _Key("force", _switch),
}
KEYS: Final[Sequence[str]] = tuple(_KEYS)
"""Keys of a specification."""


class SpecMistake(NamedTuple):
    """A mistake in a specification."""

    key: str
    what: str
    """The end of a sentence about the key, with the remedy."""


def spec_of(document: object, *, place: str = "") -> RolloutSpec:
    """Return the specification in a document of TOML or JSON.

    Raises ``InvalidArgument`` with all mistakes, one per line; each begins with ``place``.
    """
    spec, mistakes = read_spec(document)
    if spec is None:
        raise InvalidArgument("\n".join(f"{place}{each.key}: {each.what}" for each in mistakes))
    return spec


def spec_of_file(text: str, file: str) -> RolloutSpec:
    """Return the specification in the text of a file. Raises ``InvalidArgument`` with all mistakes and their lines."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # invalid TOML, overlong integers, deep nesting
        raise InvalidArgument(f"{file}: {error}") from None
    spec, mistakes = read_spec(document)
    if spec is None:
        raise InvalidArgument("\n".join(f"{file}{_line(text, each.key)}: {each.key}: {each.what}" for each in mistakes))
    return spec


def _line(text: str, key: str) -> str:
    """Return ``:line`` of a key, or nothing if it is not in the text."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(rf"""\s*\[?["']?{re.escape(key)}["']?\s*[=.\]]""", line):
            return f":{number}"
    return ""


def read_spec(document: object) -> tuple[RolloutSpec | None, Sequence[SpecMistake]]:
    """Return the specification in a document, or None and its mistakes."""
    if not isinstance(document, dict):
        return None, [SpecMistake("rollout", "must be an object with the keys to, steps, hold, gate and so on")]
    mistakes = list(_unknown(document))
    values: dict[str, Any] = {}
    for name, key in _KEYS.items():
        if name in document:
            try:
                values[key.field] = key.read(document[name])
            except (ValueError, InvalidArgument) as error:
                mistakes.append(SpecMistake(name, str(error)))
    if "to" not in document:
        mistakes.append(SpecMistake("to", 'is missing: name the version to roll out, as in to = "2"'))
    if values.get("to") and values.get("to") == values.get("baseline"):
        mistakes.append(SpecMistake("from", "must be another version than to"))
    return (None if mistakes else RolloutSpec(**values)), mistakes


def _unknown(document: Mapping[Any, object]) -> Iterator[SpecMistake]:
    for key in document:
        if key not in _KEYS:
            meant = nearest(str(key), _KEYS)
            remedy = f"Did you mean {meant}?" if meant else f"There are: {', '.join(_KEYS)}."
            yield SpecMistake(quoted_text(str(key)), f"is not known. {remedy}")
