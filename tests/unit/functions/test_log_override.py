"""The log of a program while servers are embedded in it."""

from __future__ import annotations

import pytest

from nerite.config.options import LogOptions
from nerite.functions.embedded import LogOverride
from nerite.observability.log import log


def test_the_last_server_that_stops_restores_the_log() -> None:
    before = log.options
    first, second = LogOverride(LogOptions(info=False)), LogOverride(LogOptions(verbose=1))
    first.apply()
    assert not log.options.info
    second.apply()
    first.restore()
    assert log.options.verbose == 1
    second.restore()
    second.restore()
    assert log.options == before


def test_a_log_file_that_cannot_be_opened_changes_nothing() -> None:
    before = log.options
    override = LogOverride(LogOptions(file="/nowhere/log"))
    with pytest.raises(OSError, match="nowhere"):
        override.apply()
    override.restore()
    assert log.options == before
