"""A run of seconds over all surfaces, with inputs that are the same each time; before it, all that once was found."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz import runner
from fuzz.runner import Plan
from fuzz.subject import Server

INPUTS = 3_000


@pytest.mark.timeout(300)
def test_a_short_run_finds_nothing(tmp_path: Path) -> None:
    plan = Plan(seed=1, inputs=INPUTS, folder=tmp_path)
    run = runner.go(lambda profile, patience: Server(profile, patience=patience), plan)
    assert [str(finding) for finding in run.findings.values()] == [], [*tmp_path.iterdir()]
    assert sum(run.tally.inputs.values()) >= INPUTS
