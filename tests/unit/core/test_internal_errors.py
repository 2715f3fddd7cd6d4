"""Internal errors are numbered and counted; the stack of each origin is logged once."""

import logging

import pytest

from nerite.core.failures import InternalErrors


def _raised(message: str) -> Exception:
    try:
        raise ZeroDivisionError(message)
    except ZeroDivisionError as error:
        return error


def test_the_answer_names_the_incident_that_the_log_has(caplog: pytest.LogCaptureFixture) -> None:
    errors = InternalErrors()
    with caplog.at_level(logging.ERROR, "nerite.internal"):
        answer = errors.report("dispatcher", _raised("no"), "of model 'm'", "id-7")
    (record,) = caplog.records
    incident = answer.message.split("incident ")[1].split(":")[0]
    assert incident in record.getMessage()
    assert record.getMessage().endswith("in dispatcher of model 'm'")
    assert record.exc_info is not None and isinstance(record.exc_info[1], ZeroDivisionError)
    assert vars(record)["request_id"] == "id-7"
    assert answer.http_status == 500


def test_a_stack_is_logged_once_and_each_incident_counted(caplog: pytest.LogCaptureFixture) -> None:
    errors = InternalErrors()
    first = errors.report("channel", _raised("a"))
    second = errors.report("channel", _raised("b" * 5_000))
    errors.report("http", _raised("c"))
    assert [record.exc_info is not None for record in caplog.records] == [True, False, True]
    told = caplog.records[1].getMessage()
    assert first.message.split()[3].rstrip(":") in told and len(told) < 400
    assert first.message != second.message
    assert {where: count for where, count in errors.counts.items() if count} == {"channel": 2, "http": 1}
    assert "dispatcher" in errors.counts
