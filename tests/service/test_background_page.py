"""docs/background.md: its commands are run, and its tables have every loop and every state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

from nerite.core.work_loop import LoopName, LoopState
from pages import Page, rows, run
from planted_work import set_units, within
from serving import NERITE, Serving, eventually, serving

PAGE = Page("docs/background.md")


def aside(running: Serving) -> float:
    return running.metrics().get('nerite_background_set_aside{about="planted",loop="webhooks"}', 0)


def test_every_loop_and_every_state() -> None:
    assert [*rows("docs/background.md", "loop")] == [*get_args(LoopName)]
    assert {*rows("docs/background.md", "state")} == {*get_args(LoopState)}


def test_the_list(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    flags = (f"--batches={tmp_path / 'batches.db'}", f"--ledger={tmp_path / 'ledger.db'}")
    with serving(tmp_path / "models", tmp_path / "log", *flags) as server:
        command = PAGE.block("nerite background\n").strip()
        wanted = PAGE.block("| stalls (batches)")
        eventually(lambda: run(f"{command} --url localhost:8000", server) == wanted)
        printed = run(f"{command} --json --url localhost:8000", server)
        assert json.loads(printed) == json.loads(run(PAGE.block("curl"), server))["loops"]


def test_dead_letters_are_retried_and_discarded(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    units = ["poison-68a1", "poison-68a2", "poison-3"]
    set_units(tmp_path, "good", *units)
    retry, discard, retry_all, discard_all = (
        line.replace("batches batch_", "webhooks poison-").replace("batches", "webhooks") + " --url localhost:8000"
        for line in PAGE.block("nerite background retry").splitlines()
    )
    with serving(tmp_path / "models", tmp_path / "log", within=within(tmp_path), internal_errors=True) as server:
        eventually(lambda: aside(server) == 3)
        listed = run([str(NERITE), "background", "list", "--url", "localhost:8000"], server, status=1)
        assert PAGE.block("batch_68a1 |").splitlines()[1].split() == listed.splitlines()[-6].split()
        assert all(f"| {unit} " in listed for unit in units)
        assert run(retry, server) == "webhooks: poison-68a1 is tried again\n"
        eventually(lambda: aside(server) == 3)
        assert run(discard, server) == "webhooks: poison-68a2 was discarded\n"
        assert len(run(retry_all, server).splitlines()) == 2
        eventually(lambda: aside(server) == 2)
        assert len(run(discard_all, server).splitlines()) == 2
        assert run([str(NERITE), "background", "--url", "localhost:8000"], server)
        for words, status in (
            (["retry"], 2), (["retry", "webhooks"], 2), (["discard", "webhooks", "a", "--all"], 2),
            (["list", "webhooks"], 2), (["retry", "webhooks", "a"], 1), (["retry", "webhooks", "--all"], 0),
            (["mend"], 2),
        ):  # fmt: skip
            run([str(NERITE), "background", *words, "--url", "localhost:8000"], server, status=status)
