"""Headers that carry the access token of a server."""

from __future__ import annotations

from typing import Final

ACCESS_HEADER: Final = "triton-access-token"
GRPC_PREFIX: Final = "triton-grpc-protocol-"


def create_auth_headers(access_token: str | None, protocol: str) -> dict[str, str]:
    """Return the header for ``http`` or ``grpc``. Raises ``ValueError`` for another protocol or an empty token."""
    if not access_token:
        raise ValueError("the access token is empty")
    if protocol not in ("http", "grpc"):
        raise ValueError(f"protocol is '{protocol}': it must be 'http' or 'grpc'")
    prefix = GRPC_PREFIX if protocol == "grpc" else ""
    return {f"{prefix}{ACCESS_HEADER}": access_token}
