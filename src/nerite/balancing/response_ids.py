"""Ids of stored responses, which begin with a tag of the member that keeps the response.

A router tells a member its tag with each request for a response, and finds the member again by the id that a later
request names or continues: without any memory, after a restart, and behind another router as well.
"""

from __future__ import annotations

import re
import secrets
from hashlib import blake2b
from typing import Final

from nerite.core.errors import InvalidArgument

TAG_HEADER: Final = "x-nerite-response-tag"
"""Header by which a router tells a member its tag."""
_PREFIX: Final = "resp_"
_TAG_BYTES: Final = 4
_ID_BYTES: Final = 24
_TAG: Final = re.compile(rf"[0-9a-f]{{{2 * _TAG_BYTES}}}")


def member_tag(name: str) -> str:
    """Return the tag of the member of this name, which is the same for all routers."""
    return blake2b(name.encode(), digest_size=_TAG_BYTES).hexdigest()


def checked_tag(tag: str) -> str:
    """Return what a router told. Raises ``InvalidArgument`` if it is no tag."""
    if not _TAG.fullmatch(tag):
        raise InvalidArgument(
            f"header '{TAG_HEADER}' is not {2 * _TAG_BYTES} hexadecimal digits; routers alone send it"
        )
    return tag


def new_response_id(tag: str = "") -> str:
    """Return the id of a new response, at the member with this tag. Without a tag, all of it is random."""
    return _PREFIX + tag + secrets.token_hex(_ID_BYTES - len(tag) // 2)


def tag_in(response_id: str) -> str:
    """Return the tag in an id; empty if it has none. That of an id without a tag belongs to no member."""
    found = _TAG.match(response_id, len(_PREFIX)) if response_id.startswith(_PREFIX) else None
    return "" if found is None else found[0]
