"""Who may read the log at the console."""

from __future__ import annotations

import pytest

from nerite.config.flag import RestrictedKey
from nerite.config.options import HttpOptions, ServerOptions
from nerite.transports.http.console import log_refusal

KEY = {"logging": RestrictedKey("X-Key", "k")}


@pytest.mark.parametrize(
    ("http", "refused"),
    [
        (HttpOptions(address="127.0.0.1"), False),
        (HttpOptions(address="0.0.0.0"), True),
        (HttpOptions(address="0.0.0.0", restricted=KEY), False),
        (HttpOptions(address="0.0.0.0", restricted={"inference": KEY["logging"]}), True),
    ],
)
def test_who_may_read_the_log(http: HttpOptions, refused: bool) -> None:
    why = log_refusal(ServerOptions(http=http))
    assert bool(why) is refused
    if refused:
        assert why.startswith(
            "the log may contain what clients have sent, and anyone can connect to HTTP (0.0.0.0:8000)."
        )
        assert "--http-restricted-api=logging:HEADER=@KEYFILE" in why
