"""A run of seconds over all surfaces, with inputs that are the same each time; before it, all that once was found."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz import runner
from fuzz.runner import Plan
from fuzz.subject import Server


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("tls", "profile", "inputs"), [(False, "plain", 3_000), (True, "plain", 1_000), (False, "routed", 1_000)]
)
def test_a_short_run_finds_nothing(tmp_path: Path, tls: bool, profile: str, inputs: int) -> None:
    plan = Plan(seed=1, inputs=inputs, folder=tmp_path, profiles=(profile,))
    run = runner.go(lambda profile, patience: Server(profile, tls=tls, patience=patience), plan)
    assert [str(finding) for finding in run.findings.values()] == [], [*tmp_path.iterdir()]
    assert sum(run.tally.inputs.values()) >= inputs
