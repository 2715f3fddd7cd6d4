"""What a router reads besides requests: cluster and members files, and the responses of members."""

from __future__ import annotations

import random
import re
from typing import Any, Final, cast

from fuzz.mutators import heads, octets, words
from nerite.balancing.member import ServerKind
from nerite.cluster.addresses import members_of_text, split_address
from nerite.cluster.cluster_file import parse_cluster
from nerite.core.errors import InvalidArgument
from nerite.core.failures import internal_errors
from nerite.router.load_reports import load_report, load_report_in
from nerite.router.member_connection import MemberConnection, MemberConnections
from nerite.router.response_body import ChunkScanner
from nerite.router.response_head import ResponseHead, ResponseHeads

_CLUSTER: Final = """
[router]
address = "127.0.0.1"
http-port = 0
grpc-port = 8001
max-body = 1024
timeout = "1m30s"
attempts = 3
access-log = true
allowed-hosts = ["a.example"]
policy-file = "policy.toml"
admin-key = "X-Admin=@keys/admin"
redis = "redis://127.0.0.1:6379/1"
ledger = "postgresql://nerite@db/ledger"
member-key-file = "router.key"
batches = "postgresql://nerite@db/batches"
batch-files = "files"
batch-concurrency = 64
batch-storage-bytes = 10_737_418_240
batch-lease = "15s"
cors-origins = ["https://app.example.com"]
model-aliases = ["claude-*=chat"]
exit-timeout = "30s"
exit-keepalive = "0s"
[router.tls]
certificate = "router.pem"
key = "router.key"
client-ca = "clients.pem"

[[pool]]
name = "interactive"
kind = "triton"
members = ["10.0.0.1:8000", { http = "[::1]:8000", grpc = "b:1", capacity = 2.0, name = "two" }]
policy = "least-work"
health-interval = "2s"
load-factor = 1.5
hedge-quantile = 0.95
serves = ["a"]
tls = { ca = "members.pem", certificate = "router.pem", server-name = "x" }
[pool.ejection]
interval = "10s"
[pool.placement]
memory = "16GiB"
key = "X-Admin-Key=@keys/admin"
[pool.placement.models]
resnet = { memory = "2GiB", least = 1, most = 2 }

[[pool]]
name = "batch"
dns = "name:8000"
borrows = true
classes = ["batch"]
[pool.scaling]
min = 0
max = 4
headroom = 0.2
rate = 5
actuator = "kubernetes"
target = "deployment/batch"
[pool.rollout]
unreachable = "hold"
[pool.rollout.models]
chat = { to = "2", from = "1", steps = [50, 100], webhook = "http://a..b/x" }

[[pool]]
name = "started"
models = "models"
replicas = 2
flags = ["--log-verbose=1"]
[pool.resources]
cpus = 1.5
gpus = 1
"""
_CLUSTER_WORDS: Final = tuple(sorted({*re.findall(r"[a-z-]+|[\"\[\]{}=.:]", _CLUSTER)}))
_MEMBERS: Final = """# all
10.0.0.1:8000
[::1]:8000 grpc=b:1 capacity=2.0 name=two drain=true  # the large one
"""
_MEMBERS_WORDS: Final = (
    "grpc=",
    "capacity=",
    "name=",
    "drain=",
    "true",
    "nan",
    "inf",
    "[",
    "]",
    ":",
    "#",
    "\u2028",
    "\x85",
)
_BODY: Final = b'data: {"choices":[]}\n\n'
_RESPONSES: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.0 200 OK\r\nConnection: keep-alive, X-A\r\nX-A: 1\r\n\r\nuntil the end",
    b"HTTP/1.1 200 OK\r\nendpoint-load-metrics: TEXT named_metrics.kv_cache_utilization=0.5, a=1\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n" + 3 * (b"16\r\n" + _BODY + b"\r\n") + b"0\r\nTrailer: x\r\n\r\n",
)


def cluster(rng: random.Random) -> tuple[bytes, ...]:
    """Return the text of a cluster file, with mistakes."""
    return (words.mutated(rng, _CLUSTER, _CLUSTER_WORDS),)


def members(rng: random.Random) -> tuple[bytes, ...]:
    """Return the text of a members file, with mistakes."""
    return (words.mutated(rng, _MEMBERS, _MEMBERS_WORDS),)


def response(rng: random.Random) -> tuple[bytes, ...]:
    """Return what a member sends on a connection, in pieces."""
    whole = rng.choice(_RESPONSES)
    if rng.random() < 0.9:
        whole = octets.mutated(rng, whole)
    return tuple(heads.pieces(rng, whole)) or (b"",)


def read_cluster(text: bytes) -> bool:
    """Return whether a cluster file has no mistakes; each must be told with its place."""
    try:
        settings = parse_cluster(text.decode(errors="replace"))
    except InvalidArgument as error:
        if not error.message.startswith("cluster.toml"):
            raise AssertionError(f"a mistake without a place: {error.message}") from None
        return False
    return len(settings.pools) > 0


def read_members(text: bytes) -> bool:
    """Return whether a members file has no mistakes; each must be told with its line."""
    try:
        found = members_of_text(text.decode(errors="replace"), "members.txt", ServerKind.NERITE, 8001)
    except InvalidArgument as error:
        if not re.match(r"members\.txt:\d+: ", error.message):
            raise AssertionError(f"a mistake without a place: {error.message}") from None
        return False
    for member in found:
        split_address(member.http)
        split_address(member.grpc)
    return len(found) > 0


class _Transport:
    def get_extra_info(self, name: str) -> Any:
        """Return what takes the options of a socket."""
        return self

    def setsockopt(self, *_: object) -> None:
        """Do nothing."""

    def abort(self) -> None:
        """Do nothing: the end of the connection follows."""

    def writelines(self, parts: Any) -> None:
        """Do nothing: nobody reads."""


class _Owner:
    def __init__(self) -> None:
        self.heads = ResponseHeads()

    def release(self, connection: MemberConnection) -> None:
        """Do nothing: the connection is not used again."""

    def lost(self, connection: MemberConnection) -> None:
        """Do nothing."""


class _Taker:
    def __init__(self) -> None:
        self.ends = 0
        self.heads = 0

    def take_whole(self, head: ResponseHead, load: bytes, body: Any) -> None:
        load_report(load)
        self.ends += 1

    def take_head(self, head: ResponseHead, load: bytes) -> None:
        load_report(load)
        load_report_in(load)
        self.heads += 1

    def take_data(self, data: Any, scanner: ChunkScanner | None) -> None:
        if self.ends or not self.heads:
            raise AssertionError("data before a head or after an end")

    def take_end(self) -> None:
        self.ends += 1

    def take_loss(self, cause: str, *, stale: bool) -> None:
        if not cause:
            raise AssertionError("a loss without a cause")
        self.ends += 1


def read_response(pieces: tuple[bytes, ...]) -> bool:
    """Have a connection take the pieces; return whether a head came. The response must end exactly once."""
    before = sum(internal_errors.counts.values())
    taker = _Taker()
    connection = MemberConnection(cast(MemberConnections, _Owner()))
    connection.connection_made(cast(Any, _Transport()))
    connection.request(taker, [b"GET / HTTP/1.1\r\n", b"\r\n"])
    for piece in pieces:
        if not connection.closed:
            connection.data_received(piece)
    connection.connection_lost(None)
    if taker.ends != 1 or taker.heads > 1:
        raise AssertionError(f"{taker.ends} ends and {taker.heads} heads")
    if sum(internal_errors.counts.values()) > before:
        raise AssertionError("an internal error")
    return taker.heads > 0


def read(surface: str, parts: tuple[bytes, ...]) -> bool:
    """Read one input of a surface."""
    if surface == "responses":
        return read_response(parts)
    return read_cluster(parts[0]) if surface == "cluster" else read_members(parts[0])
