"""Which processes a cluster file needs on this machine: servers of its pools, the router, Redis. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from nerite.cluster.addresses import split_address
from nerite.cluster.settings import ClusterSettings
from nerite.core.errors import InvalidArgument
from nerite.redis.settings import settings_of_address

ROUTER: Final = "router"
REDIS: Final = "redis"
_LOCAL: Final = ("127.0.0.1", "::1", "localhost")


class LocalProcess(NamedTuple):
    """A process of the plan."""

    name: str
    """Distinguishes it, as in ``interactive/1``."""
    program: str
    arguments: tuple[str, ...]
    address: str
    """``HOST:PORT`` that it answers on."""
    ready_path: str = ""
    """HTTP path that answers 200 once it can serve; empty: accepting connections is enough."""
    pool: str = ""
    """The pool whose member it is."""
    member: str = ""
    """Its line in the pool's members file."""

    @property
    def command(self) -> tuple[str, ...]:
        """The command line."""
        return self.program, *self.arguments


def local_plan(
    settings: ClusterSettings,
    free_port: Callable[[], int],
    members_file: Callable[[str], str],
    *,
    nerite: str,
    redis: str = "",
    redis_answers: bool = False,
) -> list[LocalProcess]:
    """Return the processes, in the order in which they are started; they are stopped in the opposite order.

    ``redis`` is the program of a Redis server, empty without one; ``redis_answers``: one listens already where the
    cluster file says. Raises ``InvalidArgument`` for a file that has nothing to start.
    """
    servers = [
        _server(pool.name, number, pool.source.models, pool.source.flags, free_port, nerite)
        for pool in settings.pools
        for number in range(1, pool.source.replicas + 1)
        if pool.source.models
    ]
    if not servers:
        raise InvalidArgument(
            f"{settings.path}: no pool has models, so there is nothing to start here. Give one models = DIRECTORY, or "
            "use nerite route, which only routes to servers that run"
        )
    if not settings.router.http_port:
        raise InvalidArgument(
            f"{settings.path}: router.http-port is 0, any free port: choose one, as in http-port = 8000"
        )
    return [*_redis(settings, redis, redis_answers), *servers, _router(settings, members_file, nerite)]


def member_lines(plan: Sequence[LocalProcess]) -> Mapping[str, list[str]]:
    """Return the lines of each pool's members file."""
    lines: dict[str, list[str]] = {}
    for process in plan:
        if process.pool:
            lines.setdefault(process.pool, []).append(process.member)
    return lines


def plan_text(plan: Sequence[LocalProcess]) -> str:
    """Return the plan for people: a line for each process."""
    width = max(len(process.name) for process in plan)
    return "\n".join(f"{process.name:{width}}  {' '.join(process.command)}" for process in plan)


def _server(
    pool: str, number: int, models: str, flags: Sequence[str], free_port: Callable[[], int], nerite: str
) -> LocalProcess:
    http, grpc, metrics = free_port(), free_port(), free_port()
    arguments = (
        "serve", models, "--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1",
        f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}", *flags,
    )  # fmt: skip
    address = f"127.0.0.1:{http}"
    member = f"{address} grpc=127.0.0.1:{grpc} metrics=127.0.0.1:{metrics} name={pool}/{number}"
    return LocalProcess(f"{pool}/{number}", nerite, arguments, address, "/v2/health/ready", pool, member)


def _router(settings: ClusterSettings, members_file: Callable[[str], str], nerite: str) -> LocalProcess:
    local = [pool.name for pool in settings.pools if pool.source.models]
    members = [word for pool in local for word in ("--members", f"{pool}={members_file(pool)}")]
    router = settings.router
    host = "127.0.0.1" if router.address in ("0.0.0.0", "::") else router.address
    return LocalProcess(
        ROUTER, nerite, ("route", settings.path, *members), f"{host}:{router.http_port}", "/v2/health/ready"
    )


def _redis(settings: ClusterSettings, program: str, answers: bool) -> list[LocalProcess]:
    url = settings.router.redis
    if not url or answers:
        return []
    found = settings_of_address(url)
    if found.host not in _LOCAL or not program:
        return []  # the router goes on without it, and says so
    arguments = ("--bind", "127.0.0.1", "--port", str(found.port), "--save", "", "--appendonly", "no")
    return [LocalProcess(REDIS, program, arguments, f"127.0.0.1:{found.port}")]


def redis_address(settings: ClusterSettings) -> tuple[str, int] | None:
    """Return host and port of the Redis that the cluster file names; None without one."""
    if not settings.router.redis:
        return None
    found = settings_of_address(settings.router.redis)
    return split_address(f"{found.host}:{found.port}")
