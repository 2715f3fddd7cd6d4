"""The two programs and the commands: what they print, where, and the exit status."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nerite
from nerite.cli import main
from nerite.cli.command import UsageError
from nerite.cli.command_line import NERITE, TRITON, complaint


def test_alone_it_gives_an_overview(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["help"], ["--help"]):
        assert main.main(arguments) == 0
        out, err = capsys.readouterr()
        assert err == ""
        for name in main.COMMANDS:
            assert f"nerite {name}" in out
        assert len(out.splitlines()) < 33  # one screen


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["version"], ["--version"]):
        assert main.main(arguments) == 0
        assert capsys.readouterr().out == f"nerite {nerite.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serv"], "nerite: unknown command 'serv'.\nDid you mean 'serve'?"),
        (["qqqq"], "nerite: unknown command 'qqqq'.\nNerite serves"),
        (["help", "serv"], "nerite: unknown command 'serv'."),
        (["--http-port=1"], "Try: nerite serve --http-port=1"),
        (["/tmp"], "To serve the models in that directory: nerite serve /tmp"),
    ],
)
def test_unknown_command(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["quota", "--jsn"], "nerite quota: error: unrecognized arguments: --jsn. Did you mean '--json'?"),
        (["quota", "--qqqqqq=1"], "nerite quota: error: unrecognized arguments: --qqqqqq=1"),
        (["bench", "m", "--concurency=1"], "unrecognized arguments: --concurency=1. Did you mean '--concurrency'?"),
        (["bench", "m", "--processes=0"], "argument --processes: '0' is not a positive integer"),
        (["top", "--interval=0"], "argument --interval: '0' is not greater than 0"),
    ],
)
def test_a_bad_argument_of_a_command(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith(f"{says}\n")


def test_help_of_serve_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["serve", "--help"], ["help", "serve"]):
        assert main.main(arguments) == 0
        out, err = capsys.readouterr()
        assert out.startswith("Usage: nerite serve [flags] [repository ...]\n")
        assert err == ""


def test_help_of_tritonserver_is_tritons(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tritonserver", "--help"])
    assert main.tritonserver() == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Usage: tritonserver [options]\n")


def test_a_mistake_ends_with_status_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main.main(["serve", "./models", "--http-port=abc"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        'Bad option: "--http-port".',
        "Invalid option value. Got abc",
        "",
        "Usage: nerite serve [flags] [repository ...]",
        "All flags: nerite serve --help",
    ]
    monkeypatch.setattr(sys, "argv", ["tritonserver", "./models"])
    assert main.tritonserver() == 1
    assert capsys.readouterr().err.endswith("\n\nUnexpected argument: ./models\n\n")


def test_a_log_file_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["serve", "./models", "--log-file=/no/such/file"]) == 1
    assert capsys.readouterr().err == ("error: cannot write the log file '/no/such/file': No such file or directory\n")


def test_the_order_in_which_a_complaint_is_printed() -> None:
    late = UsageError("late", remedy="cure")
    assert complaint(late, NERITE).startswith("late\ncure\n\nUsage: nerite serve")
    assert complaint(late, TRITON).startswith("Usage: tritonserver")
    assert complaint(late, TRITON).endswith("\n\nlate\ncure\n")
    early = complaint(UsageError("early", remedy="cure", early=True), TRITON)
    assert early.startswith("early\nUsage: tritonserver")
    assert early.endswith("\n\ncure")
    assert complaint(UsageError("bare", remedy="cure", usage=False), TRITON) == "bare\ncure"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m nerite.cli.main serve --help | head -1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "Usage: nerite serve [flags] [repository ...]\n"
    assert done.stderr == ""


def test_the_overview_does_not_load_the_server() -> None:
    code = "import sys; from nerite.cli.main import main; main([]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "nerite.cli.main" in loaded
    assert not {"numpy", "nerite.config", "nerite.server_process", "nerite.cli.command_line"} & set(loaded)
