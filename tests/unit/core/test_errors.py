import pytest

from nerite.core import errors

# Class, Triton's code, HTTP status, gRPC status.
TABLE = [
    (errors.Unknown, "UNKNOWN", 400, 2),
    (errors.InvalidArgument, "INVALID_ARG", 400, 3),
    (errors.NotFound, "NOT_FOUND", 404, 5),
    (errors.AlreadyExists, "ALREADY_EXISTS", 400, 6),
    (errors.Internal, "INTERNAL", 500, 13),
    (errors.Unsupported, "UNSUPPORTED", 501, 12),
    (errors.Unavailable, "UNAVAILABLE", 503, 14),
    (errors.Cancelled, "CANCELLED", 400, 1),
    (errors.Restricted, "UNAVAILABLE", 403, 14),
    (errors.QuotaExceeded, "UNAVAILABLE", 429, 8),
    (errors.TooLarge, "INVALID_ARG", 413, 3),
    (errors.DeadlineExceeded, "UNAVAILABLE", 503, 4),
]
NARROWER = (errors.Restricted, errors.QuotaExceeded, errors.TooLarge, errors.DeadlineExceeded)
"""Have the code of another class: Triton has no word for them."""


@pytest.mark.parametrize(("kind", "code", "http", "grpc"), TABLE)
def test_status_on_each_protocol(kind: type[errors.NeriteError], code: str, http: int, grpc: int) -> None:
    assert (kind.code, kind.http_status, kind.grpc_status) == (code, http, grpc)
    error = kind("why")
    assert error.message == str(error) == "why"


@pytest.mark.parametrize("kind", [row[0] for row in TABLE])
def test_a_prefix_keeps_the_kind_and_the_original(kind: type[errors.NeriteError]) -> None:
    error = kind("why")
    longer = error.prefixed("[request id: 7] ")
    assert type(longer) is kind
    assert longer.message == "[request id: 7] why"
    assert error.message == "why"
    assert kind("why", retry_after=3).prefixed("x").retry_after == 3


def test_a_code_leads_back_to_its_class() -> None:
    assert {code: kind for kind, code, _, _ in TABLE if kind not in NARROWER} == errors.BY_CODE
