"""The ledger of a router: a row for each request that it sends to members, whatever servers they are.

A router knows who has sent a request, which members got it, when, and how it ended; tokens it takes from ``usage`` in
the answer, or else counts its parts. What the engines did only they know: members with a ledger of their own have rows
of the same requests, with the same request id, and the router's are then copies that no bill counts.
"""

from __future__ import annotations

from time import monotonic_ns

from nerite.balancing.member import RoutedRequest
from nerite.ledger.ledger import Ledger
from nerite.ledger.row import Amounts, Ending, LedgerRow, Origin, RowKey, Source


class RouterLedger:
    """Makes the rows. Used on the loop's thread only."""

    def __init__(self, ledger: Ledger, *, tenants: bool) -> None:
        """``tenants``: a policy is in force, which says who sends a request."""
        self._ledger = ledger
        self._tenants = tenants
        self._prefix = f"{ledger.session:x}-"

    def open(
        self, tenant: str, request: RoutedRequest, arrived_ns: int, *, tokens: bool, attempt: str = ""
    ) -> RoutedAccount:
        """Return the account of a request that arrived at a time (``time.monotonic_ns``).

        ``tokens``: the parts of its answer are tokens, unless the member says how many there are. ``attempt`` is the
        id of an attempt at an item of a batch.
        """
        number = self._ledger.next_number()
        tenant = tenant if self._tenants else ""
        request_id = attempt or f"{self._prefix}{number:x}"
        return RoutedAccount(self, number, request_id, tenant, request, arrived_ns, tokens=tokens)

    def close(self, account: RoutedAccount, level: str, ending: Ending) -> None:
        """Make the row of a request that has ended."""
        now = monotonic_ns()
        wall = self._ledger.wall.offset_ns
        arrived = account.arrived_ns
        key = RowKey(
            account.tenant,
            account.request.model,
            account.request.version,
            level=level if self._tenants else "",
            origin=Origin.CLIENT,
            ending=ending,
            source=Source.COPY if account.metered else Source.ROUTER,
            pool=account.pool,
            member=account.member,
        )
        amounts = Amounts(
            prompt_tokens=account.prompt_tokens,
            cached_tokens=account.cached_tokens,
            answer_tokens=account.answer_tokens or (account.parts if account.tokens else 0),
            queue_ns=(account.sent_ns or now) - arrived,
            first_byte_ns=account.first_ns - arrived if account.first_ns else 0,
            attempts=account.attempts,
        )
        times = (arrived + wall) / 1e9, (now + wall) / 1e9
        self._ledger.add(LedgerRow(account.number, *times, key, amounts, account.request_id))


class RoutedAccount:
    """What a request has used so far."""

    __slots__ = (
        "_ledger", "answer_tokens", "arrived_ns", "attempts", "cached_tokens", "first_ns", "member", "metered",
        "number", "parts", "pool", "prompt_tokens", "request", "request_id", "sent_ns", "tenant", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        ledger: RouterLedger,
        number: int,
        request_id: str,
        tenant: str,
        request: RoutedRequest,
        arrived_ns: int,
        *,
        tokens: bool,
    ) -> None:
        self._ledger = ledger
        self.number = number
        self.request_id = request_id
        self.tenant = tenant
        self.request = request
        self.tokens = tokens
        self.arrived_ns = arrived_ns
        self.sent_ns = self.first_ns = 0
        """When it was sent to the first member, and when the first byte of its answer came; 0: not yet."""
        self.pool = self.member = ""
        """Where it was sent last."""
        self.metered = False
        """That member has a row of it in a ledger of its own."""
        self.attempts = 0
        self.prompt_tokens = self.cached_tokens = self.answer_tokens = 0
        """As the member has counted them."""
        self.parts = 0
        """Parts of the answer."""

    def sent(self, pool: str, member: str, *, metered: bool, now_ns: int) -> None:
        """Note that it is sent to a member."""
        self.sent_ns = self.sent_ns or now_ns
        self.pool, self.member, self.metered = pool, member, metered
        self.attempts += 1

    def ended(self, level: str, ending: Ending) -> None:
        """Make the row. ``level`` is the class of the request."""
        self._ledger.close(self, level, ending)
