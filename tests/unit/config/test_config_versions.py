from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.config.loading import find_versions, select_versions
from nerite.config.model_config import ModelVersionPolicy


def test_versions_are_the_directories_with_a_number_for_a_name() -> None:
    found = find_versions(["10", "9", "0", "warmup", "initial_state", "configs"])
    assert found.numbers == (0, 9, 10)
    assert found.remarks == ()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("003", "which contains leading zeros in its directory name"),
        ("00", "which contains leading zeros in its directory name"),
        ("abc", "which fails to convert to integral number"),
        ("-1", "which fails to convert to integral number"),
        ("1x", "which fails to convert to integral number"),
        ("٣", "which fails to convert to integral number"),
        ("9223372036854775808", "which fails to convert to integral number"),
        ("9" * 5000, "which fails to convert to integral number"),
    ],
)
def test_other_directories_are_told_in_tritons_words(name: str, reason: str) -> None:
    line = f"ignore version directory '{name}' {reason}"
    assert find_versions([name]) == ((), (("warning", line),))


def test_the_largest_version() -> None:
    assert find_versions(["9223372036854775807"]).numbers == (2**63 - 1,)


@given(st.sets(st.integers(0, 20)), st.integers(0, 5))
def test_the_latest_are_those_with_the_highest_numbers(existing: set[int], count: int) -> None:
    policy = ModelVersionPolicy(latest=ModelVersionPolicy.Latest(num_versions=count))
    chosen = select_versions(policy, existing, "m")
    assert list(chosen.numbers) == sorted(sorted(existing, reverse=True)[:count])
    assert chosen.remarks == ()


@given(st.sets(st.integers(0, 20)))
def test_all_is_all(existing: set[int]) -> None:
    assert select_versions(ModelVersionPolicy(all=ModelVersionPolicy.All()), existing, "m").numbers == tuple(
        sorted(existing)
    )
    assert select_versions(ModelVersionPolicy(), existing, "m").numbers == tuple(sorted(existing))


def test_a_specific_version_that_is_not_there_is_told_and_the_others_are_served() -> None:
    policy = ModelVersionPolicy(specific=ModelVersionPolicy.Specific(versions=(7, 3, 1, 7)))
    assert select_versions(policy, [1, 2, 3], "m") == (
        (1, 3),
        (("error", "version 7 is specified for model 'm', but the version directory is not present"),),
    )
