"""Where a server is."""

from __future__ import annotations

import pytest

from nerite.client import ClientError
from nerite.client.connection import Address


@pytest.mark.parametrize(
    ("url", "address", "text"),
    [
        ("gpu", Address(False, "gpu", 8000, ""), "http://gpu:8000"),
        ("localhost:9000", Address(False, "localhost", 9000, ""), "http://localhost:9000"),
        ("http://gpu/", Address(False, "gpu", 80, ""), "http://gpu:80"),
        ("https://gpu/models/", Address(True, "gpu", 443, "/models"), "https://gpu:443/models"),
        ("https://gpu:8443", Address(True, "gpu", 8443, ""), "https://gpu:8443"),
        ("[::1]:8001", Address(False, "::1", 8001, ""), "http://[::1]:8001"),
    ],
)
def test_read(url: str, address: Address, text: str) -> None:
    assert Address.parse(url) == address
    assert str(address) == text


@pytest.mark.parametrize("url", ["", "grpc://gpu:8001", "gpu:http", "gpu:99999", "http://"])
def test_refused(url: str) -> None:
    with pytest.raises(ClientError, match="is not an address") as refused:
        Address.parse(url)
    assert refused.value.status is None
