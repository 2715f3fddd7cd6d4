"""The playbooks of background loops: a database is locked by another program, and work fails again and again."""

from __future__ import annotations

import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path

from planted_work import set_units, within
from playbooks import Platform, Playbook, platform
from serving import IDENTITY, IN_PROCESS, Serving, eventually, pbtxt, python_model, serving


def staged(stack: ExitStack, folder: Path, *flags: str) -> tuple[Platform, Serving]:
    """Run the platform with one member, which has the loop with planted faults."""
    python_model(folder / "models", "identity", IDENTITY, pbtxt(parameters=IN_PROCESS))
    member = stack.enter_context(
        serving(folder / "models", folder / "log", *flags, within=within(folder), internal_errors=True)
    )
    return stack.enter_context(platform(folder, [member], count=1)), member


def test_a_loop_that_stands_goes_on_when_its_database_answers(tmp_path: Path) -> None:
    playbook = Playbook("A loop that stands")
    (look,) = playbook.commands("Look")
    (over,) = playbook.commands("Over")
    ledger = tmp_path / "ledger.db"
    with ExitStack() as stack:
        stage, member = staged(stack, tmp_path, f"--ledger={ledger}")
        with closing(sqlite3.connect(ledger)) as other:
            other.execute("BEGIN EXCLUSIVE")
            member.infer("identity", [1.0])
            stage.pages(playbook)
            (labels,) = stage.prometheus.firing(playbook.alert)
            assert labels["loop"] == "ledger"
            said = stage.enter(look, status=1)
            assert "| ledger " in said
            assert "ledger: nothing has advanced for" in said
            assert "locked" in said
            assert member.ready(), "requests are answered meanwhile"
        stage.is_over(playbook)
        stage.enter(over)
    assert "ledger makes progress again" in member.text


def test_work_that_was_set_aside_is_retried_and_discarded(tmp_path: Path) -> None:
    playbook = Playbook("Work that was set aside")
    (look,) = playbook.commands("Look")
    retry, discard = playbook.commands("Type")
    set_units(tmp_path, "good", "poison-1", "poison-2")
    with ExitStack() as stack:
        stage, member = staged(stack, tmp_path)
        stage.pages(playbook)
        said = stage.enter(look, status=1)
        assert said.count("| alice ") == 2
        assert "incident" in said
        assert "poison-1 is tried again" in stage.enter(retry)
        eventually(lambda: member.metrics()['nerite_background_failures_total{about="planted",loop="webhooks"}'] == 8)
        eventually(lambda: member.metrics()['nerite_background_set_aside{about="planted",loop="webhooks"}'] == 2)
        assert "poison-2 was discarded" in stage.enter(discard)
        stage.is_over(playbook)
    assert sorted((tmp_path / "discarded").read_text().split()) == ["poison-1", "poison-2"]
