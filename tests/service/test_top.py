"""``nerite top`` at a real terminal, and without one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from pages import Page
from serving import IDENTITY, NERITE, PATIENCE, Serving, eventually, pbtxt, python_model, serving

SIZE = (24, 160)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("top")
    models = folder / "models"
    for name in ("numbers", "others"):
        python_model(models, name, IDENTITY, pbtxt(batch=8))
    with serving(models, folder / "log") as running:
        yield running


def command(server: Serving, *words: str) -> list[str]:
    metrics = f"127.0.0.1:{server.ports['Metrics']}"
    return [str(NERITE), "top", "--url", server.http, "--metrics-url", metrics, *words]


class Terminal:
    """A terminal with the command in it."""

    def __init__(self, words: list[str], size: tuple[int, int] = SIZE) -> None:
        """``size``: rows and columns."""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs)
        self._theirs = theirs
        self.text = ""
        os.set_blocking(self._ours, False)

    def look(self) -> str:
        with contextlib.suppress(BlockingIOError):
            while more := os.read(self._ours, 1 << 16):
                self.text += more.decode()
        return self.text

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    @property
    def settings(self) -> list[object]:
        return termios.tcgetattr(self._theirs)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def terminal(server: Serving) -> Iterator[Terminal]:
    made = Terminal(command(server, "--interval", "0.2"))
    yield made
    made.close()


def ask(server: Serving) -> None:
    body = {"inputs": [{"name": "INPUT0", "shape": [2, 1], "datatype": "FP32", "data": [1, 2]}]}
    assert server.ask("POST", "/v2/models/numbers/infer", json.dumps(body).encode())[0] == 200


def rows(screen: str) -> list[list[str]]:
    return [line.split() for line in screen.rpartition("\x1b[H")[2].split("\r\n")]


def test_at_a_terminal(server: Serving, terminal: Terminal) -> None:
    def busy() -> bool:
        ask(server)
        shown = {row[0]: row for row in rows(terminal.look()) if row}
        return (
            "numbers" in shown and shown["numbers"][3] not in ("0", "-") and shown["numbers"][7].strip("\x1b[K") == "0"
        )

    eventually(busy)
    assert "sorted by requests" in terminal.text
    terminal.press("n")
    eventually(lambda: "sorted by name" in terminal.look())
    terminal.press("q")
    assert terminal.process.wait(PATIENCE) == 0
    assert terminal.look().endswith("\x1b[?25h\x1b[?1049l")
    assert terminal.settings == terminal.before


def test_a_server_that_goes_and_comes_back(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "numbers", IDENTITY, pbtxt(batch=8))
    with serving(tmp_path / "models", tmp_path / "log") as server:
        terminal = Terminal(command(server, "--interval", "0.1"))

        def last() -> str:
            return terminal.look().rpartition("\x1b[H")[2]

        eventually(lambda: "numbers" in last())
        ports = (f"--http-port={server.ports['HTTPService']}", f"--metrics-port={server.ports['Metrics']}")
    try:
        eventually(lambda: "stale: " in last() and "numbers" in last())
        with serving(tmp_path / "models", tmp_path / "other log", *ports):
            eventually(lambda: "numbers" in last() and "stale: " not in last())
            terminal.press("q")
            assert terminal.process.wait(PATIENCE) == 0
    finally:
        terminal.close()


def test_ctrl_c_leaves_the_terminal_as_it_was(terminal: Terminal) -> None:
    eventually(lambda: "sorted by" in terminal.look())
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(PATIENCE) == 0
    assert terminal.look().endswith("\x1b[?25h\x1b[?1049l")
    assert terminal.settings == terminal.before


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)


def test_without_a_terminal(server: Serving) -> None:
    done = run(command(server, "--interval", "0.1", "--sort", "name"))
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[:3] for line in done.stdout.splitlines()] == [
        ["Model", "Version", "State"],
        ["numbers", "1", "READY"],
        ["others", "1", "READY"],
    ]


def test_for_programs(server: Serving) -> None:
    ask(server)
    done = run(command(server, "number", "--interval", "0.1", "--json"))
    (told,) = json.loads(done.stdout)
    assert (told["model"], told["state"], told["waiting"], told["restarts"]) == ("numbers", "READY", 0, 0)
    assert told["memory"] > 1e6


def test_the_commands_of_the_page(server: Serving) -> None:
    lines = Page("docs/metrics.md").block("nerite top").strip().splitlines()
    assert len(lines) == 3
    for line in lines:
        assert run(command(server, *line.split()[2:], "--interval", "0.1")).returncode == 0


def test_where_there_are_no_metrics(server: Serving, tmp_path: Path) -> None:
    done = run([str(NERITE), "top", "--url", server.http, "--metrics-url", "127.0.0.1:9", "--once"])
    assert (done.returncode, done.stdout) == (1, "")
    assert "--metrics-url HOST:PORT" in done.stderr
    python_model(tmp_path / "models", "numbers", IDENTITY, pbtxt(batch=8))
    with serving(tmp_path / "models", tmp_path / "log", "--allow-metrics=false") as without:
        done = run([str(NERITE), "top", "--url", without.http, "--once"])
    assert (done.returncode, done.stdout) == (1, "")
    assert "the HTTP port has no metrics (" in done.stderr and "--metrics-url HOST:PORT" in done.stderr


def test_the_metrics_are_found_on_the_http_port(server: Serving) -> None:
    ask(server)
    done = run([str(NERITE), "top", "number", "--url", server.http, "--interval", "0.1", "--json"])
    (told,) = json.loads(done.stdout)
    assert (told["model"], told["requests"]) == ("numbers", 0)


def test_a_window_of_80_columns(server: Serving) -> None:
    terminal = Terminal(command(server, "--interval", "0.2"), (24, 80))
    try:
        eventually(lambda: "not shown: " in terminal.look())
        assert "Requests/s" in terminal.text
        terminal.press("q")
        assert terminal.process.wait(PATIENCE) == 0
    finally:
        terminal.close()
