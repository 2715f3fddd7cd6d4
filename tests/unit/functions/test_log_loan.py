"""The log of a program while servers are embedded in it."""

from __future__ import annotations

import pytest

from nerite.config.options import LogOptions
from nerite.functions.embedded import LogLoan
from nerite.observability.log import log


def test_the_last_server_that_stops_restores_the_log() -> None:
    before = log.options
    first, second = LogLoan(LogOptions(info=False)), LogLoan(LogOptions(verbose=1))
    first.take()
    assert not log.options.info
    second.take()
    first.give_back()
    assert log.options.verbose == 1
    second.give_back()
    second.give_back()
    assert log.options == before


def test_a_log_file_that_cannot_be_opened_changes_nothing() -> None:
    before = log.options
    loan = LogLoan(LogOptions(file="/nowhere/log"))
    with pytest.raises(OSError, match="nowhere"):
        loan.take()
    loan.give_back()
    assert log.options == before
