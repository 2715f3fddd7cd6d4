"""What an exchange knows of its calls to members and of its client, and the errors of calls that have no answer."""

from __future__ import annotations

from typing import Protocol

from nerite.balancing.member import Member
from nerite.core.errors import NeriteError
from nerite.router.pools import RouterPool


class BadGateway(NeriteError):
    """A member failed to answer, and no other member was asked."""

    plain = True
    code = "UNAVAILABLE"
    http_status = 502
    grpc_status = 14


class GatewayTimeout(NeriteError):
    """The deadline of a request passed at a member."""

    plain = True
    code = "UNAVAILABLE"
    http_status = 504
    grpc_status = 4


class SilentMember(BadGateway):
    """A member has sent nothing for too long."""

    http_status = 504
    grpc_status = 4


class MemberCall(Protocol):
    """A request at a member."""

    @property
    def owed(self) -> bool:
        """Whether the member is to send something: it has the request, and the client reads the answer."""

    def cancel(self) -> None:
        """Tell the member that its answer is no longer wanted. Nothing is reported afterwards."""


class ExchangeClient(Protocol):
    """The client's side of an exchange."""

    def send_to(self, pool: RouterPool, member: Member) -> MemberCall:
        """Send the request to a member; the call reports to the exchange, never before this returns."""

    def refuse(self, error: NeriteError) -> None:
        """Answer with an error. No part of an answer was sent."""

    def break_off(self, error: NeriteError) -> None:
        """End an answer that has begun and cannot be completed, so that the client notices."""
