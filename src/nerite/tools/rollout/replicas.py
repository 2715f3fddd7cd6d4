"""The replicas of a fleet: which there are, and how they are told and asked."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path

from nerite.cli.command import UsageError
from nerite.client import Client, ClientError
from nerite.cluster.addresses import split_address
from nerite.core.errors import NeriteError
from nerite.rollouts.fleet import Replica
from nerite.rollouts.fleet_order import FleetOrder
from nerite.tools.up.follower import ask

_DNS = "dns:"
_POOL = "pool:"
_ASK_SECONDS = 5.0


class ReplicaSource:
    """The URLs of the replicas: fixed, those that a name has in DNS, the members of a pool, or the lines of a file."""

    def __init__(self, fixed: Sequence[str], where: str) -> None:
        """``where`` is ``dns:NAME:PORT``, ``pool:ROUTER:PORT/POOL``, the path of a file, or empty.

        Raises ``UsageError``.
        """
        if not fixed and not where:
            raise UsageError("which replicas are there? Use --replica URL, once for each, or --replicas dns:NAME:PORT")
        self._fixed = list(fixed)
        self._where = where
        if where.startswith(_DNS):
            _, name, port = [*where.split(":", 2), ""][:3]
            if not name or not port.isdigit():
                raise UsageError(f"--replicas {where}: write dns:NAME:PORT")
        elif where.startswith(_POOL):
            router, _, pool = where.removeprefix(_POOL).partition("/")
            try:
                self._router = split_address(router)
            except ValueError:
                pool = ""
            if not pool:
                raise UsageError(f"--replicas {where}: write pool:ROUTER:PORT/POOL, with the router's metrics port")
        self._last: list[str] = []
        self.problem = ""
        """Why it could not be found out which there are; those of the last time are kept then."""

    def look(self) -> list[str]:
        """Return the URLs. Blocks."""
        try:
            self._last = self._found()
            self.problem = ""
        except (OSError, ValueError) as error:
            self.problem = f"--replicas {self._where}: {error}"
        return list(dict.fromkeys([*self._fixed, *self._last]))

    def _found(self) -> list[str]:
        if self._where.startswith(_DNS):
            _, name, port = self._where.split(":", 2)
            found = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
            hosts = sorted({str(address[0]) for *_, address in found})
            return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
        if self._where.startswith(_POOL):
            return self._members(self._where.partition("/")[2])
        if not self._where:
            return []
        lines = (line.partition("#")[0].strip() for line in Path(self._where).read_text().splitlines())
        return [line for line in lines if line]

    def _members(self, name: str) -> list[str]:
        """Return the members that a router knows of a pool. Raises ``ValueError`` without an answer."""
        report = ask(*self._router, "GET", "/v2/pools", _ASK_SECONDS)
        if report is None:
            raise ValueError("the router does not answer on its metrics port")
        pools = {pool["name"]: pool["members"] for pool in report.get("pools", ())}
        if name not in pools:
            raise ValueError(f"the router has no pool '{name}', but {', '.join(pools) or 'none'}")
        return [str(member["http"]) for member in pools[name]]


class Replicas:
    """Asks replicas, all at once."""

    def __init__(self, model: str, headers: Mapping[str, str], timeout: float, executor: Executor) -> None:
        self._model = model
        self._headers = headers
        self._timeout = timeout
        self._executor = executor
        self._clients: dict[str, Client] = {}

    def look(self, names: Sequence[str]) -> dict[str, Replica]:
        """Return what each replica says of its rollout. Blocks."""
        return self._each(names, self._status)

    def tell(self, orders: Mapping[str, FleetOrder]) -> dict[str, Replica]:
        """Send each replica its order; return what they say then. Blocks."""
        return self._each(list(orders), lambda name: self._follow(name, orders[name]))

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()

    def _each(self, names: Sequence[str], ask: Callable[[str], Replica]) -> dict[str, Replica]:
        def answer(name: str) -> Replica:
            try:
                return ask(name)
            except ClientError as error:
                return Replica(str(error).partition("\n")[0])
            except (NeriteError, LookupError, TypeError, ValueError) as error:
                return Replica(f"its status cannot be read, is it of another release? {error}")

        for name in self._clients.keys() - set(names):
            self._clients.pop(name).close()
        for name in names:
            if name not in self._clients:
                self._clients[name] = Client(name, headers=dict(self._headers), timeout=self._timeout)
        return dict(zip(names, self._executor.map(answer, names), strict=True))

    def _status(self, name: str) -> Replica:
        try:
            return Replica.of_status(self._clients[name].rollout(self._model))
        except ClientError as error:
            if error.status == 404:
                return Replica()  # no rollout; if the model is unknown, the start of the rollout fails
            raise

    def _follow(self, name: str, order: FleetOrder) -> Replica:
        try:
            return Replica.of_status(self._clients[name].follow_rollout(self._model, order.as_json()))
        except ClientError as error:
            if error.status != 409:
                raise
            seen = self._status(name)
            if seen.order is not None and seen.order.id == order.id and seen.order.term > order.term:
                return seen  # another command leads
            return seen._replace(problem=str(error).partition("\n")[0])
