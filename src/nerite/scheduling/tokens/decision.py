"""What a gate says, and what it is told in the end."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, TypeAlias

from nerite.scheduling.tokens.refusal import Refusal
from nerite.scheduling.tokens.ticket import Ticket


class Refused(NamedTuple):
    """One that waited and does no more."""

    ticket: Ticket
    refusal: Refusal


class Admit(NamedTuple):
    """Give it to the engine now."""


class Wait(NamedTuple):
    """Keep it until ``due`` names it."""

    displaced: tuple[Refused, ...] = ()
    """Those that wait no more because it matters more."""


class Refuse(NamedTuple):
    """Answer it with the refusal; the gate has forgotten it."""

    refusal: Refusal


Decision: TypeAlias = Admit | Wait | Refuse


class Due(NamedTuple):
    """What is to be done now."""

    admitted: list[Ticket]
    refused: list[Refused]


class Ending(Enum):
    """How a request ended that was let in."""

    COMPLETE = "complete"
    CANCELLED = "cancelled"
    """The client went or gave up."""
    DEADLINE = "deadline"
    FAILED = "failed"
    """The engine's fault."""
    REFUSED = "refused"
    """It was found to be too long when it was looked at."""
