"""Who sends a request, for admission control and the caches. Models do not see it."""

from __future__ import annotations

from typing import Final, NamedTuple


class Caller(NamedTuple):
    """What the head of a request says of who sent it. There is one only where a policy is in force."""

    tenant: str
    """By the name that the policy has for them."""
    wanted_class: str = ""
    """Empty: that of the tenant."""
    patience_ns: int = 0
    """From the request's arrival on; after that nobody waits for the answer. 0: for ever."""
    retry: bool = False
    """It was asked before."""


MIXED: Final = Caller("")
"""Of a request that is for several tenants at once, or for one that cannot be told: no cache keeps anything of it."""
