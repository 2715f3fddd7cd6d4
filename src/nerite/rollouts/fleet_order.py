"""What a fleet command tells each replica, and what a replica keeps of it.

An order is the whole state that the fleet wants, not a change: it may be sent again and again. Those of a later command
have a higher term, and a replica refuses orders of lower terms, so two commands cannot steer it at once. Replicas keep
the last order, so a command that is started anew finds there where the rollout was; it needs no state of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from nerite.config.rollout_spec import RolloutSpec, spec_of
from nerite.core.errors import Conflict, InvalidArgument, NeriteError
from nerite.core.text import text_error
from nerite.rollouts.rollout import Rollout, RolloutCommand

_ID: Final = re.compile("[0-9a-f]{12}")
_MAX_TEXT: Final = 4096
_MAX_NUMBER: Final = 2**53
_MAX_LEASE: Final = 86400.0
_SECOND: Final = 1_000_000_000


class FleetOrder(NamedTuple):
    """The state of a fleet's rollout."""

    id: str
    """Of the rollout; the same on every replica."""
    term: int
    """Number of the command that leads, from 1; the later has the higher one."""
    sequence: int
    """Number of the order within its term."""
    started: str
    """Time of day when the rollout was started."""
    rollout: Rollout
    text: str = ""
    """The last decision as a sentence."""
    verdict: Mapping[str, str] = {}
    """Decision and reason of the judge of the fleet; empty if nothing is known yet."""
    blind: bool = False
    """The command has had no counts of Prometheus for long, so replicas watch for harm by themselves."""
    answered: str = ""
    """Id of the last wish of this replica that was carried out or refused."""
    lease: float = 60.0
    """Seconds after which a replica that hears nothing watches for harm by itself."""
    declared: bool = False
    """A router leads, because its cluster file asks for the rollout."""

    @property
    def age(self) -> tuple[int, int]:
        """What orders the orders of one rollout."""
        return self.term, self.sequence

    def declares(self, spec: RolloutSpec) -> bool:
        """Return whether it is of a rollout for which a cluster file asks with this specification."""
        return self.declared and shared_spec(self.rollout.spec) == shared_spec(spec)

    def as_json(self) -> dict[str, Any]:
        """Return the order; ``of_json`` reads it."""
        return {**self._asdict(), "rollout": self.rollout.as_json()}

    @classmethod
    def of_json(cls, document: object) -> FleetOrder:
        """Read an order. Raises ``InvalidArgument``."""
        if isinstance(document, dict):
            document = {"declared": False, **document}  # earlier releases do not write it
        if not isinstance(document, dict) or document.keys() != set(cls._fields):
            raise InvalidArgument(f"an order of a fleet is an object with exactly the keys {', '.join(cls._fields)}")
        for name in ("id", "started", "text", "answered"):
            if not isinstance(document[name], str) or text_error(document[name], _MAX_TEXT) is not None:
                raise InvalidArgument(f"{name}: must be a string of at most {_MAX_TEXT} characters")
        if not _ID.fullmatch(document["id"]):
            raise InvalidArgument("id: must have 12 hexadecimal digits")
        for name in ("term", "sequence"):
            value = document[name]
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _MAX_NUMBER:
                raise InvalidArgument(f"{name}: must be a number from 1")
        lease = document["lease"]
        if isinstance(lease, bool) or not isinstance(lease, int | float) or not 1 <= lease <= _MAX_LEASE:
            raise InvalidArgument(f"lease: must be from 1 to {_MAX_LEASE:g} seconds")
        for name in ("blind", "declared"):
            if not isinstance(document[name], bool):
                raise InvalidArgument(f"{name}: must be true or false")
        verdict = document["verdict"]
        if not isinstance(verdict, dict) or verdict.keys() - {"decision", "reason"}:
            raise InvalidArgument("verdict: must be an object with the keys decision and reason")
        for value in verdict.values():
            if not isinstance(value, str) or text_error(value, _MAX_TEXT) is not None:
                raise InvalidArgument(f"verdict: its values must be strings of at most {_MAX_TEXT} characters")
        return cls(**{**document, "rollout": _rollout(document["rollout"])})


def _rollout(document: object) -> Rollout:
    if not isinstance(document, dict):
        raise InvalidArgument("rollout: must be an object")
    try:
        spec = spec_of(document["spec"], place="rollout: ")
        rollout = Rollout.of_json(document, spec)
    except NeriteError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidArgument(f"rollout: has another form: {error}") from None
    if not spec.baseline:
        raise InvalidArgument("rollout: from: is missing: the same version must be the baseline on every replica")
    return rollout


def shared_spec(spec: RolloutSpec) -> RolloutSpec:
    """Return what replicas get of a specification: the command alone posts to the webhook."""
    return replace(spec, webhook="")


class FleetLead:
    """What a replica knows of the fleet command that leads its rollout."""

    def __init__(self, order: FleetOrder, now_ns: int) -> None:
        self.order = order
        self.checked = False
        """The candidate has passed the check on this replica, since the server started."""
        self.wish: dict[str, Any] | None = None
        """What an operator asked of this replica, and the fleet has not answered yet."""
        self._heard_ns = now_ns

    def hear(self, order: FleetOrder, now_ns: int) -> bool:
        """Take an order; return whether it tells anything new. Raises ``Conflict`` if it is of an earlier command."""
        last = self.order
        if order.age < last.age:
            raise Conflict(
                f"another fleet command leads this rollout: its term is {last.term}, that of this order {order.term}"
            )
        self.order, self._heard_ns = order, now_ns
        if self.wish is not None and self.wish["id"] == order.answered:
            self.wish = None
        return (order.term, order.rollout.state, order.rollout.step, order.text) != (
            last.term, last.rollout.state, last.rollout.step, last.text,
        )  # fmt: skip

    def silent_seconds(self, now_ns: int) -> float:
        """Return for how long nothing was heard."""
        return max(0, now_ns - self._heard_ns) / _SECOND

    def leads(self, now_ns: int) -> bool:
        """Return whether the fleet decides alone: it was heard within the lease, and it sees counts."""
        return self.silent_seconds(now_ns) <= self.order.lease and not self.order.blind

    def ask(self, command: RolloutCommand, number: str, now_ns: int, *, force: bool) -> None:
        """Keep a command of an operator for the fleet. Raises ``Conflict`` if the fleet would not hear it."""
        if (silent := self.silent_seconds(now_ns)) > self.order.lease:
            raise Conflict(
                f"cannot {command} a rollout of a fleet whose command is silent for {silent:.0f} s: start that again, "
                "with the same nerite rollout start ... --fleet. To abort works on any replica in any case"
            )
        self.wish = {"id": number, "command": str(command), "force": force}

    def status(self, now_ns: int) -> dict[str, Any]:
        """Return the part of a status that a fleet command reads."""
        return {
            "order": self.order.as_json(),
            "silent": round(self.silent_seconds(now_ns), 3),
            "leads": self.leads(now_ns),
            "checked": self.checked,
            "wish": self.wish,
        }

    def as_json(self) -> dict[str, Any]:
        """Return what outlives a restart; ``of_json`` restores it."""
        return self.order.as_json()

    @classmethod
    def of_json(cls, document: Mapping[str, Any], now_ns: int) -> FleetLead:
        """Restore a lead as if its order had just been heard. Raises ``InvalidArgument``."""
        return cls(FleetOrder.of_json(document), now_ns)
