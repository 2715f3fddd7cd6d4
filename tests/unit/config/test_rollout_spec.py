"""Specifications of rollouts: the same keys in a request and in a file, and every mistake with its remedy."""

from __future__ import annotations

import pytest

from nerite.config.rollout_spec import AtDeadline, RolloutSpec, spec_of, spec_of_file
from nerite.core.durations import duration_of, duration_text
from nerite.core.errors import InvalidArgument

WHOLE = """\
to = "3"
from = 2
steps = [1, 5.5, 100]
shadow = "12.5%"
hold = "1m30s"
requests = 50
deadline = "1d"
at-deadline = "rollback"
gate = ["errors", "p99=+10%"]
sticky = "header:x-user"
webhook = "https://hooks.example.com:8443/a?b=c"
record = true
force = true
"""


def test_every_key_in_a_file_and_in_a_request() -> None:
    spec = spec_of_file(WHOLE, "rollout.toml")
    assert spec == RolloutSpec(
        "3",
        "2",
        (1.0, 5.5, 100.0),
        12.5,
        90.0,
        50,
        86400.0,
        AtDeadline.ROLL_BACK,
        ("errors", "p99=+10%"),
        "header:x-user",
        "https://hooks.example.com:8443/a?b=c",
        True,
        True,
    )
    assert spec_of(spec.as_json()) == spec
    assert spec_of(RolloutSpec("2").as_json()) == spec_of({"to": 2}) == RolloutSpec("2")


def test_what_the_command_line_passes_on() -> None:
    told = {"to": "2", "steps": "1,5,25 %,100", "hold": "30", "requests": "7", "gate": "errors"}
    spec = spec_of({**told, "steps": "1,5,25%,100"})
    assert (spec.steps, spec.hold, spec.requests, spec.gates) == ((1, 5, 25, 100), 30, 7, ("errors",))


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("to", "two", "must be the number of a version, as in 2"),
        ("to", True, "must be the number of a version"),
        ("to", "0", "must be the number of a version"),
        ("from", "2", "must be another version than to"),
        ("steps", [], "must be 1 to 32 percentages, as in 1,5,25,50,100"),
        ("steps", "1,x,100", "must be percentages above 0 and up to 100"),
        ("steps", "1,101", "must be percentages above 0 and up to 100"),
        ("steps", "nan,100", "must be percentages above 0"),
        ("steps", [True, 100], "must be percentages above 0"),
        ("steps", [5, 5, 100], "must increase"),
        ("steps", [1, 50], "must end with 100, which is the promotion"),
        ("steps", [100], "must have a step below 100"),
        ("shadow", "much", "must be a percentage above 0 and up to 100, as in 10%"),
        ("shadow", 0, "must be a percentage above 0"),
        ("shadow", "101%", "must be a percentage above 0"),
        ("shadow", True, "must be a percentage above 0"),
        ("hold", "5 minutes", "must be a duration, as in 30s, 5m or 1h30m"),
        ("hold", -1, "must be from 0 to 366 days"),
        ("hold", 10**400, "must be from 0 to 366 days"),
        ("hold", float("nan"), "must be from 0 to 366 days"),
        ("hold", True, "must be a duration"),
        ("deadline", "400d", "must be from 0 to 366 days"),
        ("requests", -1, "must be a number of requests, 0 or more"),
        ("requests", 1.5, "must be a number of requests"),
        ("at-deadline", "leave", "must be one of stay, promote, rollback"),
        ("gate", "speed", "unknown; gates are errors"),
        ("gate", [], "must be a list of 1 to 32 gates"),
        ("gate", ["errors", "errors"], "has the same gate twice"),
        ("gate", [1], "must be a string of at most 1024 characters"),
        ("sticky", "user,cookie", "Use header:NAME, parameter:NAME, tenant"),
        ("webhook", "ftp://example.com", "must be a URL, as in https://hooks.example.com/rollouts"),
        ("webhook", "http://example.com:x/", "must be a URL"),
        ("webhook", "http://a..b/x", "'a..b' is no host"),
        ("webhook", "http://-a.b/", "'-a.b' is no host"),
        ("webhook", f"http://{'a' * 64}.b/", "is no host"),
        ("webhook", f"http://{'a.' * 127}b/", "is no host"),
        ("webhook", "http:///x", "'' is no host"),
        ("webhook", "http://a:0/", "its port is 0"),
        ("webhook", "http://a:65536/", "its host or its port is invalid"),
        ("webhook", "http://[::1/", "its host or its port is invalid"),
        ("webhook", "http://[x]/", "its host or its port is invalid"),
        ("webhook", "http://bücher.example/", "hosts of other alphabets are written as xn--"),
        ("webhook", "http://a\\@b/", "it has a character that must be written as %XX"),
        ("webhook", "//a.b/", "it must begin with http:// or https://"),
        ("webhook", "http://example.com/\r\nHost: other", "without control characters"),
        ("force", "yes", "must be true or false"),
        ("step", "1,100", "is not known. Did you mean steps?"),
        ("x" * 2000, 1, "is not known. There are: to, from, steps"),
    ],
)  # fmt: skip
def test_each_mistake_has_its_key_and_its_remedy(key: str, value: object, what: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        spec_of({"to": "2", key: value})
    (line,) = caught.value.message.splitlines()
    assert what in line
    assert line.startswith(key[:50])


def test_all_mistakes_are_told_with_their_lines() -> None:
    text = '# of a\nto = "2"\n\nhold = "soon"\ngate = ["errors"]\n"requests" = "many"\n[step]\na = 1\n'
    with pytest.raises(InvalidArgument) as caught:
        spec_of_file(text, "m/rollout.toml")
    assert sorted(line.partition(": ")[0] for line in caught.value.message.splitlines()) == [
        "m/rollout.toml:4", "m/rollout.toml:6", "m/rollout.toml:7",
    ]  # fmt: skip
    with pytest.raises(InvalidArgument, match=r"m/rollout.toml: to: is missing: name the version"):
        spec_of_file("", "m/rollout.toml")
    with pytest.raises(InvalidArgument, match=r"m/rollout.toml: .*line 1"):
        spec_of_file("to = \n", "m/rollout.toml")


def test_what_is_no_object() -> None:
    with pytest.raises(InvalidArgument, match="rollout: must be an object"):
        spec_of(["2"])


@pytest.mark.parametrize(
    ("text", "seconds"), [("250ms", 0.25), ("30s", 30), ("5m", 300), ("1h30m", 5400), ("2d", 172800), ("1.5", 1.5)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_of(text) == seconds
    assert duration_of(duration_text(seconds)) == seconds


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (90, "1m30s"), (5400, "1h30m"), (0.25, "0.25s")])
def test_durations_as_text(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
