"""The request id of an attempt at an item of a batch, by which ledgers know that two requests were for the same item.

An item whose answer was not committed when a server or router crashed, or lost its lease, runs again. The id of each
attempt says which item it is for:

    BATCH.LINE.ATTEMPT      the line in hexadecimal; ATTEMPT is random, as no process knows what another has tried

Servers believe such an id only of routers with a key and of themselves: an item that is repeated is not charged.
The id of a batch is no secret: clients get it.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

_PREFIX: Final = "batch_"
_ITEM_AND_ATTEMPT: Final = re.compile(rf"({_PREFIX}[0-9a-f]{{32}}\.[0-9a-f]{{1,8}})\.[0-9a-f]{{12}}")
"""The whole has at most 64 characters, the longest request id that servers take."""
_RANDOM_BYTES: Final = 6
"""Of an attempt. Of the few attempts at one item, no two must have the same."""


def new_batch_id() -> str:
    """Return an id for a batch."""
    return _PREFIX + secrets.token_hex(16)


def new_attempt(batch: str, line: int) -> str:
    """Return the request id of an attempt at the item in a line of a batch's input file."""
    return f"{batch}.{line:x}.{secrets.token_hex(_RANDOM_BYTES)}"


def item_of(request_id: str) -> str:
    """Return the item that a request id names, the same for all attempts at it; empty for any other request."""
    if not request_id.startswith(_PREFIX):
        return ""
    found = _ITEM_AND_ATTEMPT.fullmatch(request_id)
    return "" if found is None else found[1]
