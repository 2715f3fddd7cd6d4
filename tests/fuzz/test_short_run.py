"""A run of seconds over all surfaces, with inputs that are the same each time; before it, all that once was found."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz import runner
from fuzz.runner import Plan
from fuzz.subject import Server
from postgres_server import postgres_programs


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("tls", "profile", "inputs"),
    [
        (False, "plain", 2_400),
        (True, "plain", 600),
        (False, "routed", 800),
        (False, "shared", 600),
        (False, "picker", 400),
    ],
)
def test_a_short_run_finds_nothing(tmp_path: Path, tls: bool, profile: str, inputs: int) -> None:
    if profile == "shared":
        postgres_programs()
    plan = Plan(seed=1, inputs=inputs, folder=tmp_path, profiles=(profile,))
    run = runner.go(lambda profile, patience: Server(profile, tls=tls, patience=patience), plan)
    assert [str(finding) for finding in run.findings.values()] == [], [*tmp_path.iterdir()]
    assert sum(run.tally.inputs.values()) >= inputs
