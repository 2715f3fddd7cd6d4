"""``route.toml``: what it may say, and where a mistake is."""

from __future__ import annotations

from pathlib import Path

import pytest

from nerite.config.sticky_key import StickyKey
from nerite.core.errors import InvalidArgument
from nerite.routes.route_file import parse_route_file, read_route_file, route_from_json, route_to_json
from nerite.scheduling.weighted_route import RouteArm, RouteShadow, WeightedRoute

VERSIONS = """
# Nine of ten.
sticky = ["header:X-User", "prompt:64"]
salt = "2026"

[[arm]]
version = 1
weight = 90

[[arm]]
version = "2"
weight = 10.5
"""


def test_arms_are_versions_of_the_model() -> None:
    route, places = parse_route_file(VERSIONS.encode(), "route.toml", "m")
    keys = (StickyKey.parse("header:x-user"), StickyKey.parse("prompt:64"))
    assert route == WeightedRoute("m", (RouteArm("m", "1", 90), RouteArm("m", "2", 10.5)), keys, "2026")
    assert places == ["route.toml:6", "route.toml:10"]


def test_arms_are_other_models() -> None:
    text = '[[arm]]\nmodel = "v1"\nweight = 1\n[[arm]]\nmodel = "v2"\nweight = 0\n'
    assert parse_route_file(text.encode(), "f", "m").route.arms == (RouteArm("v1", "", 1), RouteArm("v2", "", 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sticky = [", "route.toml: "),
        ("\xff", "route.toml: "),
        ("", "route.toml: a route needs arms"),
        ("arm = 1", "route.toml:1: a route needs arms"),
        ("wieght = 1\n[[arm]]", "route.toml:1: 'wieght' is not known. A route has: arm, sticky, salt"),
        ("[[arm]]\nversion = 1\nwieght = 1", "route.toml:3: 'wieght' is not known. An arm has: model, version, weight"),
        ("[[arm]]\nversion = 1", "route.toml:1: weight must be a number"),
        ("[[arm]]\nversion = 1\nweight = true", "route.toml:3: weight must be a number"),
        ("[[arm]]\nversion = 1\nweight = -1", "route.toml:1: route 'm': the weight -1.0"),
        ("[[arm]]\nversion = 0\nweight = 1", "route.toml:2: version must be a version number"),
        ("[[arm]]\nversion = 1.5\nweight = 1", "route.toml:2: version must be a version number"),
        ("[[arm]]\nmodel = ''\nweight = 1", "route.toml:2: model must be the name of a model"),
        ("[[arm]]\nweight = 1", "route.toml:1: route 'm': the arm 'm' is the route itself"),
        ("sticky = ['cookie']\n[[arm]]\nversion = 1\nweight = 1", "route.toml:1: 'cookie' cannot be a sticky key"),
        ("sticky = [1]\n[[arm]]\nversion = 1\nweight = 1", "route.toml:1: sticky must be a list of keys"),
        ("salt = 1\n[[arm]]\nversion = 1\nweight = 1", "route.toml:1: salt must be text"),
        ("[[arm]]\nversion = 1\nweight = 1\n" * 17, "route.toml:1: a route has at most 16 arms"),
        ("[[arm]]\nversion = 1\nweight = " + "9" * 400, "route.toml:3: weight is too large"),
    ],
)
def test_a_mistake_has_its_place(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_route_file(text.encode("latin-1"), "route.toml", "m")
    assert refused.value.message.startswith(message)


SHADOW = """
[[arm]]
version = 1
weight = 1

[shadow]
version = 2
share = "12.5%"
samples = "/tmp/samples.jsonl"
contents = true
timeout = 5
"""
ANSWERS = "[[arm]]\nversion = 1\nweight = 1\n"


def test_a_shadow() -> None:
    file = parse_route_file(SHADOW.encode(), "route.toml", "m")
    assert file.route.shadow == RouteShadow(
        RouteArm("m", "2", 0), 0.125, timeout=5, samples="/tmp/samples.jsonl", contents=True
    )
    assert (file.places, [arm.version for arm in file.route.targets]) == (["route.toml:2", "route.toml:6"], ["1", "2"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shadow = 1\n" + ANSWERS, "f:1: shadow must be a table"),
        (ANSWERS + "[shadow]\nversion = 2", "f:4: share must be text such as"),
        (ANSWERS + "[shadow]\nversion = 2\nshare = 0.1", "f:6: share must be text such as"),
        (ANSWERS + "[shadow]\nversion = 2\nshare = '101%'", "f:6: share must be text such as"),
        (ANSWERS + "[shadow]\nversion = 2\nshare = 'nan%'", "f:6: share must be text such as"),
        (ANSWERS + "[shadow]\nversion = 0\nshare = '1%'", "f:5: version must be a version number"),
        (ANSWERS + "[shadow]\nversion = 1\nshare = '1%'", "f:4: route 'm': all requests go to 'm:1', so there is"),
        (ANSWERS + "[shadow]\nshare = '1%'", "f:4: route 'm': the arm 'm' is the route itself"),
        (ANSWERS + "[shadow]\nversion = 2\nshare = '1%'\nweight = 1", "f:7: 'weight' is not known. A shadow has: "),
        (ANSWERS + "[shadow]\nversion = 2\nshare = '1%'\ntimeout = '1s'", "f:7: timeout must be a number of seconds"),
        (ANSWERS + "[shadow]\nversion = 2\nshare = '1%'\ntimeout = 0", "f:4: route 'm': timeout of the shadow must be"),
        (ANSWERS + "[shadow]\nversion = 2\nshare = '1%'\nconcurrency = true", "f:7: concurrency must be a number"),
        (ANSWERS + "[shadow]\nversion = 2\nshare = '1%'\nsamples = 'a'", "f:7: samples must be the absolute path"),
        (
            ANSWERS + "[shadow]\nversion = 2\nshare = '1%'\nsamples = '" + "a" * 2000 + "'",
            "f:7: the path of the samples is",
        ),
        (ANSWERS + "[shadow]\nversion = 2\nshare = '1%'\ncontents = true", "f:7: contents has no effect without"),
    ],
)
def test_a_mistake_of_a_shadow_has_its_place(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_route_file(text.encode(), "f", "m")
    assert refused.value.message.startswith(message)


def test_a_shadow_as_json_names_no_file() -> None:
    text = SHADOW.replace("samples", "# samples").replace("contents = true", "")
    route = parse_route_file(text.encode(), "f", "m").route
    assert route_from_json({**route_to_json(route), "shadow_results": {"requests": 1}}, "m") == route
    with pytest.raises(InvalidArgument, match="may name a file for samples"):
        route_from_json(route_to_json(parse_route_file(SHADOW.encode(), "f", "m").route), "m")


def test_a_directory_without_the_file_has_no_route(tmp_path: Path) -> None:
    assert read_route_file(tmp_path) is None
    (tmp_path / "route.toml").write_text("#" * 70_000)
    with pytest.raises(InvalidArgument, match="more than 65536 bytes are not a route"):
        read_route_file(tmp_path)


def test_a_route_as_json_is_read_as_it_is_written() -> None:
    route = parse_route_file(VERSIONS.encode(), "f", "m").route
    assert route_from_json(route_to_json(route), "m") == route
    with pytest.raises(InvalidArgument, match="a route is an object"):
        route_from_json([], "m")
    with pytest.raises(InvalidArgument, match="route 'm': 'weights' is not known"):
        route_from_json({"weights": []}, "m")
