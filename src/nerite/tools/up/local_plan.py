"""Which processes a cluster file needs on this machine: servers of its pools, the router, Redis. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from nerite.cluster.addresses import join_address, split_address
from nerite.cluster.settings import ClusterSettings, PoolSettings
from nerite.core.errors import InvalidArgument
from nerite.redis.settings import settings_of_address

ROUTER: Final = "router"
REDIS: Final = "redis"
_READY: Final = "/v2/health/ready"
_LIVE: Final = "/v2/health/live"
_STANDBY: Final = "--standby"
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
    standby: bool = False
    """It has loaded no model and waits to be woken."""

    @property
    def command(self) -> tuple[str, ...]:
        """The command line."""
        return self.program, *self.arguments


def local_plan(
    settings: ClusterSettings,
    free_port: Callable[[], int],
    members_file: Callable[[str], str],
    state_of: Callable[[str], str] = str,
    *,
    nerite: str,
    redis: str = "",
    redis_answers: bool = False,
) -> list[LocalProcess]:
    """Return the processes, in the order in which they are started; they are stopped in the opposite order.

    ``redis`` is the program of a Redis server, empty without one; ``redis_answers``: one listens already where the
    cluster file says. ``state_of`` returns the directory of a server for the state of its rollouts. Raises
    ``InvalidArgument`` for a file that has nothing to start.
    """
    servers = [
        server_process(pool, name, free_port, nerite, standby=number > members, state=state_of(name))
        for pool in settings.pools
        if pool.source.models
        for members, standbys in [_counts(pool)]
        for number in range(1, members + standbys + 1)
        for name in [f"{pool.name}/{number}"]
    ]
    if not any(pool.source.models for pool in settings.pools):
        raise InvalidArgument(
            f"{settings.path}: no pool has models, so there is nothing to start here. Give one models = DIRECTORY, or "
            "use nerite route, which only routes to servers that run"
        )
    if not settings.router.http_port:
        raise InvalidArgument(
            f"{settings.path}: router.http-port is 0, any free port: choose one, as in http-port = 8000"
        )
    if any(pool.scaling and pool.source.models for pool in settings.pools) and not settings.router.metrics_port:
        raise InvalidArgument(
            f"{settings.path}: router.metrics-port is 0, any free port: choose one, as in metrics-port = 8002. "
            "nerite up asks there how many members are wanted"
        )
    router = router_process(settings, members_file, nerite, waits=not all(server.standby for server in servers))
    return [*_redis(settings, redis, redis_answers), *servers, router]


def _counts(pool: PoolSettings) -> tuple[int, int]:
    """Return how many members and standbys a pool begins with."""
    return (pool.source.replicas, 0) if pool.scaling is None else (pool.scaling.least, pool.scaling.warm)


def member_lines(settings: ClusterSettings, plan: Sequence[LocalProcess]) -> Mapping[str, list[str]]:
    """Return the lines of each local pool's members file."""
    return {
        pool.name: [process.member for process in plan if process.pool == pool.name and not process.standby]
        for pool in settings.pools
        if pool.source.models
    }


def plan_text(plan: Sequence[LocalProcess]) -> str:
    """Return the plan for people: a line for each process."""
    width = max(len(process.name) for process in plan)
    return "\n".join(f"{process.name:{width}}  {' '.join(process.command)}" for process in plan)


def rollout_lines(settings: ClusterSettings) -> list[str]:
    """Return a line for each rollout that the router leads."""
    return [
        f"rollout of {model} in pool {pool.name}: {text}"
        for pool in settings.pools
        if pool.rollout is not None
        for model, text in pool.rollout.texts
    ]


def server_process(
    pool: PoolSettings,
    name: str,
    free_port: Callable[[], int],
    nerite: str,
    *,
    standby: bool = False,
    host: str = "127.0.0.1",
    state: str = "",
) -> LocalProcess:
    """Return the process of a server of a pool. With ``standby`` it loads no model before it is woken.

    ``state`` is the directory for the state of rollouts, which has an effect if the pool has any.
    """
    http, grpc, metrics = free_port(), free_port(), free_port()
    rollouts = () if pool.rollout is None else (f"--rollout-state={state}", *pool.rollout.server_flags)
    arguments = (
        "serve", pool.source.models,
        f"--http-address={host}", f"--grpc-address={host}", f"--metrics-address={host}",
        f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}", *rollouts, *pool.source.flags,
    )  # fmt: skip
    address = join_address(host, http)
    member = f"{address} grpc={join_address(host, grpc)} metrics={join_address(host, metrics)} name={name}"
    served = LocalProcess(name, nerite, arguments, address, _READY, pool.name, member)
    return served._replace(arguments=(*arguments, _STANDBY), ready_path=_LIVE, standby=True) if standby else served


def awake(process: LocalProcess) -> LocalProcess:
    """Return a standby as it is once it was woken, and as it is started again after that."""
    return process._replace(arguments=process.arguments[:-1], ready_path=_READY, standby=False)


def router_process(
    settings: ClusterSettings, members_file: Callable[[str], str], nerite: str, *, waits: bool
) -> LocalProcess:
    """Return the process of the router; with ``waits`` it is ready when a member is."""
    local = [pool.name for pool in settings.pools if pool.source.models]
    members = [word for pool in local for word in ("--members", f"{pool}={members_file(pool)}")]
    router = settings.router
    host = "127.0.0.1" if router.address in ("0.0.0.0", "::") else router.address
    return LocalProcess(
        ROUTER, nerite, ("route", settings.path, *members), f"{host}:{router.http_port}", _READY if waits else _LIVE
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
