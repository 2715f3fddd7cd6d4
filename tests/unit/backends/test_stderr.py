from __future__ import annotations

import logging
import os
import re

import pytest

from nerite.backends import machine

CHATTER = re.compile(rb"hello")


def test_chatter_is_logged_and_the_rest_goes_through(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("test_stderr")
    caplog.set_level(logging.DEBUG)
    with machine.capture_stderr(CHATTER, log) as found:
        os.write(2, b"hello there\nan error\nhello again")
    os.write(2, b"afterwards\n")
    assert found == ["hello there", "hello again"]
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("DEBUG", "hello there"),
        ("DEBUG", "hello again"),
    ]
    assert capfd.readouterr().err == "an error\nafterwards\n"


def test_what_was_said_is_not_lost_when_it_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), machine.capture_stderr(CHATTER, logging.getLogger("test_stderr")):
        os.write(2, b"the reason\n")
        raise ZeroDivisionError
    assert capfd.readouterr().err == "the reason\n"
