"""The one error of the client."""

from __future__ import annotations

from collections.abc import Mapping


class ClientError(Exception):
    """What was asked for did not happen. ``str()`` is the server's text where it answered, and the client's where not.

    ``status`` is the HTTP status of the answer; None if there was none, because the server did not answer or because
    what was to be sent cannot be sent.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class Unreachable(ClientError):
    """Nobody accepted the connection."""


def text_in(error: object) -> str:
    """Return what the field ``error`` of an answer says: a text, or under ``/v1`` an object that has it."""
    return str(error.get("message", error) if isinstance(error, Mapping) else error)
