"""Changing the log through the logging extension."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nerite.core.errors import InvalidArgument, Unsupported
from nerite.observability.log import log
from nerite.transports.settings import change_log_settings


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = log.settings
    yield
    log.change(before)


def change(**settings: Any) -> None:
    def read(name: str, kind: type, value: Any) -> Any:
        if type(value) is not kind:
            raise InvalidArgument(name)
        return value

    change_log_settings(settings.items(), read, lambda name: InvalidArgument(f"no format {name}"))


def test_what_is_given_changes_and_nothing_else() -> None:
    before = log.settings
    change(log_warning=False, log_verbose_level=3, log_format="json", colour="red")
    assert log.settings == before | {"log_warning": False, "log_verbose_level": 3, "log_format": "json"}


def test_nothing_is_told_of_a_level_that_is_off(capfd: pytest.CaptureFixture[str]) -> None:
    log.info("before")
    change(log_info=False, log_verbose_level=1)
    log.info("between")
    log.verbose(1, "a detail")
    change(log_info=True, log_verbose_level=0)
    log.info("after")
    log.verbose(1, "no more")
    said = capfd.readouterr().out
    assert [word in said for word in ("before", "between", "a detail", "after", "no more")] == [
        True,
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"log_info": False, "log_format": "iso"}, InvalidArgument),
        ({"log_info": False, "log_verbose_level": "1"}, InvalidArgument),
        ({"log_info": False, "log_file": "/tmp/log"}, Unsupported),
        ({"log_info": False, "log_verbose_level": 2**32}, InvalidArgument),
        ({"log_info": False, "log_verbose_level": 2**64}, InvalidArgument),
    ],
)
def test_what_is_refused_changes_nothing(settings: dict[str, Any], error: type[Exception]) -> None:
    before = log.settings
    with pytest.raises(error):
        change(**settings)
    assert log.settings == before
