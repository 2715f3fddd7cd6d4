"""The rules of getopt_long, against a model of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nerite.cli.command import UsageError
from nerite.cli.command_line import NERITE, GivenFlag, scan
from nerite.cli.flags import BY_NAME, FLAGS

VALUED = [flag for flag in FLAGS if flag.kind.label]
TRITON = [flag.name for flag in FLAGS if not flag.ours]
text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
plain = text.filter(lambda word: not word.startswith("-"))


@st.composite
def flag_arguments(draw: st.DrawFn) -> tuple[list[str], GivenFlag]:
    flag, value = draw(st.sampled_from(VALUED)), draw(text)
    found = GivenFlag(flag, value, f"--{flag.name}")
    return ([f"--{flag.name}={value}"] if draw(st.booleans()) else [f"--{flag.name}", value]), found


@given(st.lists(st.one_of(flag_arguments(), plain)), st.none() | st.lists(text))
def test_flags_in_order_then_the_rest_in_order(
    parts: list[tuple[list[str], GivenFlag] | str], rest: list[str] | None
) -> None:
    arguments: list[str] = []
    flags: list[GivenFlag] = []
    others: list[str] = []
    for part in parts:
        if isinstance(part, str):
            arguments.append(part)
            others.append(part)
        else:
            arguments.extend(part[0])
            flags.append(part[1])
    if rest is not None:
        arguments += ["--", *rest]
        others += rest
    repositories = [GivenFlag(BY_NAME["model-repository"], other, other) for other in others]
    assert list(scan(arguments, NERITE)) == [*flags, *repositories]


@given(st.sampled_from(TRITON), st.integers(1, 60))
def test_a_prefix_means_the_only_flag_of_tritons_that_it_fits(name: str, length: int) -> None:
    prefix = name[:length]
    fitting = [known for known in TRITON if known.startswith(prefix)]
    expected = prefix if prefix in fitting else fitting[0] if len(fitting) == 1 else ""
    try:
        valued = not expected or BY_NAME[expected].kind.label
        (found,) = scan([f"--{prefix}", "1"] if valued else [f"--{prefix}"], NERITE)
    except UsageError as error:
        assert not expected
        assert "is ambiguous; possibilities: " + " ".join(f"'--{known}'" for known in fitting) in error.text
    else:
        assert found.flag.name == expected


def test_our_flags_have_prefixes_where_triton_has_no_use_for_them() -> None:
    assert [f.flag.name for f in scan(["--opt=x", "--http-r=x"], NERITE)] == [
        "options-file",
        "http-restricted-api",
    ]


def test_a_flag_without_value_is_true() -> None:
    assert list(scan(["--disable"], NERITE)) == [
        GivenFlag(BY_NAME["disable-auto-complete-config"], "true", "--disable-auto-complete-config")
    ]
