"""What a download shows on a terminal, what it asks, and what it says where nobody is."""

from __future__ import annotations

import builtins
import io
import sys

import pytest

from nerite.core.transfer import DownloadProgress
from nerite.sources.fetching import TerminalWatcher
from nerite.sources.hub_download import DownloadPlan
from nerite.sources.hub_files import HubChoice, HubFile
from nerite.sources.name import HubName


class Terminal(io.StringIO):
    """A terminal, which remembers what is written to it."""

    def isatty(self) -> bool:
        return True


def plan(size: int, licence: str = "mit") -> DownloadPlan:
    return DownloadPlan(HubName("org/m", "c" * 40), licence, HubChoice((HubFile("a", size, "a" * 64),)), size)


def test_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    watcher = TerminalWatcher()
    assert watcher.agrees(plan(500_000_000_000)), "nobody is there to be asked"
    progress = DownloadProgress("'org/m'", 1, 100, 0.0)
    for done in range(100):
        progress.done = done
        watcher.progress(progress, 100)
    watcher.ended()
    said = capsys.readouterr()
    assert said.out == ""
    first, *lines = said.err.splitlines()
    assert first == f"nerite: hf:org/m@{'c' * 40}: 1 file, 500.0 GB to download; licence: mit"
    assert [line.partition(":")[0] for line in lines] == ["nerite"], "the first one of ten seconds"
    assert "\r" not in said.err


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    watcher = TerminalWatcher()
    progress = DownloadProgress("'org/m'", 1, 100_000_000, 0.0)
    progress.done = 50_000_000
    watcher.progress(progress, 100_000_000)
    shown = screen.getvalue()
    assert "downloading [###############...............]  50% of 100.0 MB" in shown
    assert "a second" in shown
    assert " left" in shown
    watcher.told("a line")
    watcher.ended()
    assert screen.getvalue().endswith("\r\x1b[Knerite: a line\n\r\x1b[K")


@pytest.mark.parametrize(("answer", "agrees"), [("", True), ("y", True), ("n", False), ("no", False)])
def test_large_downloads_ask_who_is_there(monkeypatch: pytest.MonkeyPatch, answer: str, agrees: bool) -> None:
    asked: list[str] = []

    def ask(question: str) -> str:
        asked.append(question)
        return answer

    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, Terminal())
    monkeypatch.setattr(builtins, "input", ask)
    assert TerminalWatcher().agrees(plan(9_000_000_000)), "that is not large"
    assert asked == []
    assert TerminalWatcher().agrees(plan(60_000_000_000)) == agrees
    assert asked == ["Download 60.0 GB? [Y/n] "]
    assert TerminalWatcher(consent=True).agrees(plan(60_000_000_000))
    assert len(asked) == 1


def test_a_licence_that_is_not_stated(capsys: pytest.CaptureFixture[str]) -> None:
    TerminalWatcher().agrees(plan(1, ""))
    assert capsys.readouterr().err.endswith("licence: not stated\n")
