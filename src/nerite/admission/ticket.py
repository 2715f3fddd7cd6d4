"""A request as admission sees it: what it asks for, and how far it has come."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, TypeAlias

from nerite.admission.accounts import Account
from nerite.admission.estimates import KvReservation
from nerite.admission.policy import PriorityClass
from nerite.admission.refusals import AdmissionRefusal, QuotaLimit


class TicketState(Enum):
    """How far a request has come."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    OVER = "over"


class AdmissionTicket:
    """Made for a request, offered to a gate once, and told to it until the request is over. For reading."""

    account: Account
    """Whoever pays. There is one from the offer on."""

    __slots__ = (
        "account",
        "admitted_at",
        "bound",
        "caused",
        "charged",
        "cost",
        "deadline",
        "expected",
        "generated",
        "gone",
        "holding",
        "input_size",
        "least",
        "level",
        "most",
        "offered_at",
        "priority",
        "read_with",
        "repeats",
        "retry",
        "sequences",
        "started_at",
        "state",
        "tenant",
        "wanted_class",
    )

    def __init__(
        self,
        tenant: str,
        input_size: int,
        most: int = 0,
        *,
        wanted_class: str = "",
        deadline: int | None = None,
        retry: bool = False,
        caused: bool = False,
        least: int | None = None,
        sequences: int = 1,
        priority: int = 0,
        repeats: bool = False,
    ) -> None:
        self.tenant = tenant
        """The name that the policy gives to whoever sent it."""
        self.input_size = input_size
        """Tokens of the prompt, as far as is known; bytes, for a model that is no LLM."""
        self.least = input_size if least is None else least
        """As many there are in any case, where ``input_size`` is an estimate: by it what is too long is refused."""
        self.sequences = sequences
        """Answers to the one prompt."""
        self.repeats = repeats
        """Another request has the same prompt, and pays for it."""
        self.priority = priority
        """Among those of its tenant and class that wait: the lower ones first."""
        self.most = most
        """Output tokens that it may have at the most. 0: as many as the model's limits allow."""
        self.wanted_class = wanted_class
        """A class below the tenant's own. Empty: the tenant's own."""
        self.deadline = deadline
        """When its answer must be complete. None: never."""
        self.retry = retry
        """It says that it was asked before."""
        self.caused = caused
        """Another request needs it, which was let in: it counts for no request of its own, whatever else it takes."""

        self.level = PriorityClass()
        self.state = TicketState.NEW
        self.expected = 0
        """Output tokens that it will probably have."""
        self.bound = 0
        """Output tokens that it has KV blocks for."""
        self.cost = 0.0
        """What it counts for in the fair queue, and in the pace."""
        self.charged: dict[QuotaLimit, int] = {}
        """What its tenant has paid in advance."""
        self.holding = KvReservation(0)
        self.read_with = 0
        """Tokens of prompts that were to be read when it was let in, its own included."""
        self.generated = 0
        self.gone = False
        """Nobody reads its answer any more."""
        self.offered_at = 0
        self.admitted_at = 0
        self.started_at: int | None = None
        """When it had its first token."""

    @property
    def paid_input(self) -> int:
        """What the tenant pays for the prompt, as far as its size is known."""
        return 0 if self.repeats else self.input_size


# What a gate says, and what it is told in the end.


class RefusedTicket(NamedTuple):
    """One that waited and does no more."""

    ticket: AdmissionTicket
    refusal: AdmissionRefusal


class Admit(NamedTuple):
    """Give it to the engine now."""


class Wait(NamedTuple):
    """Keep it until ``due`` names it."""

    displaced: tuple[RefusedTicket, ...] = ()
    """Those that wait no more because it matters more."""


class Refuse(NamedTuple):
    """Answer it with the refusal; the gate has forgotten it."""

    refusal: AdmissionRefusal


Decision: TypeAlias = Admit | Wait | Refuse


class DueTicket(NamedTuple):
    """What is to be done now."""

    admitted: list[AdmissionTicket]
    refused: list[RefusedTicket]


class TicketEnding(Enum):
    """How a request ended that was let in."""

    COMPLETE = "complete"
    CANCELLED = "cancelled"
    """The client went or gave up."""
    DEADLINE = "deadline"
    FAILED = "failed"
    """The engine's fault."""
    REFUSED = "refused"
    """It was found to be too long when it was looked at."""
