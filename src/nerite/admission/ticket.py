"""Tickets, the view that admission control has of a request: its needs and its state; and the decisions on it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, TypeAlias

from nerite.admission.accounts import Account
from nerite.admission.estimates import KvReservation
from nerite.admission.policy import PriorityClass
from nerite.admission.refusals import AdmissionRefusal, QuotaLimit


class TicketState(Enum):
    """State of a request in admission control."""

    NEW = "new"
    LEASING = "leasing"
    """It waits until Redis has been asked for quota."""
    WAITING = "waiting"
    RUNNING = "running"
    OVER = "over"


class AdmissionTicket:
    """Represents a request in the ``AdmissionController``, from the offer until the request is over.

    Only the controller and its parts change it.
    """

    account: Account
    """Account that is charged. Set when the ticket is offered."""

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
        "paid",
        "preempted",
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
        paid: bool = False,
    ) -> None:
        self.tenant = tenant
        """Name of the tenant in the policy."""
        self.input_size = input_size
        """Tokens of the prompt, estimated until they are counted; bytes for models other than LLMs."""
        self.least = input_size if least is None else least
        """Lower bound of the size if ``input_size`` is an estimate; used to reject requests that are too large."""
        self.sequences = sequences
        """Number of answers to the prompt."""
        self.repeats = repeats
        """Another request has the same prompt and is charged for it."""
        self.paid = paid
        """Quotas were charged for an earlier attempt: it takes a place of its tenant's concurrency, nothing else."""
        self.priority = priority
        """Priority among the waiting requests of its tenant and class; lower values run first."""
        self.most = most
        """Maximum number of output tokens; 0 for as many as the model's limits allow."""
        self.wanted_class = wanted_class
        """Requested class, below the tenant's own; empty for the tenant's own."""
        self.deadline = deadline
        """When its answer must be complete; None for no deadline."""
        self.retry = retry
        """It is marked as a retry."""
        self.caused = caused
        """An admitted request depends on it: it is not charged as a request, only for what else it uses."""

        self.level = PriorityClass()
        self.state = TicketState.NEW
        self.expected = 0
        """Expected number of output tokens."""
        self.bound = 0
        """Number of output tokens that KV blocks are reserved for."""
        self.cost = 0.0
        """Its cost in the fair queue and in the measured speed of the engine."""
        self.charged: dict[QuotaLimit, int] = {}
        """Amounts charged to its tenant in advance."""
        self.holding = KvReservation(0)
        self.read_with = 0
        """Prompt tokens waiting for prefill when it was admitted, its own included."""
        self.generated = 0
        self.gone = False
        """Its client has gone."""
        self.preempted = False
        """It is of the idle class and is being stopped for others; its charges are refunded."""
        self.offered_at = 0
        self.admitted_at = 0
        self.started_at: int | None = None
        """When its first token was generated."""

    @property
    def paid_input(self) -> int:
        """Input size that the tenant is charged for."""
        return 0 if self.repeats else self.input_size


class RefusedTicket(NamedTuple):
    """Ticket that was waiting and is rejected, with the reason."""

    ticket: AdmissionTicket
    refusal: AdmissionRefusal


class Admit(NamedTuple):
    """Decision to pass the request to the engine now."""


class Wait(NamedTuple):
    """Decision to hold the request until ``due`` returns it."""

    displaced: tuple[RefusedTicket, ...] = ()
    """Less important requests that were shed to make room for it."""


class AwaitLease(NamedTuple):
    """Decision to offer the request again once Redis has answered: its tenant's shared quotas must be leased first."""


class Refuse(NamedTuple):
    """Decision to reject the request; the controller keeps no state of it."""

    refusal: AdmissionRefusal


Decision: TypeAlias = Admit | Wait | AwaitLease | Refuse


class DueTicket(NamedTuple):
    """Waiting requests to admit or reject now."""

    admitted: list[AdmissionTicket]
    refused: list[RefusedTicket]


class TicketEnding(Enum):
    """How an admitted request ended."""

    COMPLETE = "complete"
    CANCELLED = "cancelled"
    """The client disconnected or cancelled."""
    DEADLINE = "deadline"
    FAILED = "failed"
    """The engine failed."""
    REFUSED = "refused"
    """Its prompt turned out to be too long once its tokens were counted."""
