"""The cluster file: what it says as data, and every mistake with its line, key and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.balancing.member import Member, ServerKind
from nerite.balancing.model_placement import PlacementPolicy
from nerite.balancing.policy import ChoicePolicy
from nerite.cluster.addresses import join_address, member_of, members_of_text, split_address
from nerite.cluster.cluster_file import parse_cluster, read_cluster
from nerite.cluster.settings import MemberTls, PlacedModel, PortTls
from nerite.core.errors import InvalidArgument

WHOLE = """
[router]
address = "0.0.0.0"
http-port = 9000
grpc-port = 9001
metrics-port = 9002
policy-file = "policy.toml"
admin-key = "X-Admin-Key=@keys/admin"
redis = "redis://127.0.0.1:6379/0"
ledger = "ledger.db"
batches = "batches.db"
paths = ["/v1/images/edits"]
timeout = "30s"
access-log = true

[[pool]]
name = "interactive"
kind = "vllm"
members = ["10.0.0.1:8000", { http = "[::1]:8000", grpc = "10.0.0.2:8001", capacity = 2.0, name = "two" }]
policy = "power-of-two"
prefix = false
health-interval = "500ms"
grpc-port = 8001

[pool.ejection]
consecutive-failures = 3

[[pool]]
name = "batch"
members-file = "members.txt"
borrows = true
classes = ["batch"]

[[pool]]
name = "local"
models = "models"
replicas = 2
"""


def test_the_whole_file() -> None:
    cluster = parse_cluster(WHOLE, "/etc/nerite/cluster.toml")
    router = cluster.router
    assert (router.address, router.http_port, router.grpc_port, router.metrics_port) == ("0.0.0.0", 9000, 9001, 9002)
    assert (router.policy_file, router.redis) == ("/etc/nerite/policy.toml", "redis://127.0.0.1:6379/0")
    assert router.admin_key == "X-Admin-Key=@/etc/nerite/keys/admin"
    assert (router.ledger, router.batches) == ("/etc/nerite/ledger.db", "/etc/nerite/batches.db")
    assert (router.timeout, router.access_log, router.paths) == (30, True, ("/v1/images/edits",))
    first, second, third = cluster.pools
    assert first.source.members == (
        Member("10.0.0.1:8000", "10.0.0.1:8000", "10.0.0.1:8001", ServerKind.VLLM),
        Member("two", "[::1]:8000", "10.0.0.2:8001", ServerKind.VLLM, 2.0),
    )
    assert first.balancing.choice is ChoicePolicy.POWER_OF_TWO
    assert first.balancing.ejection is not None
    assert (first.balancing.prefix, first.balancing.ejection.consecutive_failures) == (False, 3)
    assert first.health_interval == 0.5
    assert (second.name, second.source.file, second.borrows, second.classes) == (
        "batch", "/etc/nerite/members.txt", True, ("batch",),
    )  # fmt: skip
    assert (third.source.models, third.source.replicas) == ("/etc/nerite/models", 2)


PLACED = """
[[pool]]
name = "models"
kind = "triton"
members = ["h:1", { http = "h:2", memory = "24GiB", metrics = "h:3" }]
metrics-port = 8002
hold-requests = 50
hold-timeout = "10s"

[pool.placement]
memory = "16GiB"
model-memory = "512MiB"
least = 1
target = 4
hold = "30s"
load-timeout = "5m"
key = "X-Admin-Key=@keys"

[pool.placement.models]
resnet = { memory = "2GiB", least = 2, most = 3 }
"""


def test_the_placement_of_models() -> None:
    (pool,) = parse_cluster(PLACED, "/etc/nerite/cluster.toml").pools
    assert pool.source.members == (
        Member("h:1", "h:1", kind=ServerKind.TRITON, metrics="h:8002"),
        Member("h:2", "h:2", kind=ServerKind.TRITON, memory=24 << 30, metrics="h:3"),
    )
    assert (pool.most_held, pool.hold_timeout) == (50, 10.0)
    placement = pool.placement
    assert placement is not None
    assert (placement.memory, placement.least, placement.most) == (16 << 30, 1, 0)
    assert placement.policy == PlacementPolicy(target=4.0, hold=30.0, patience=300.0, unknown_bytes=512 << 20)
    assert placement.key == "X-Admin-Key=@/etc/nerite/keys"
    assert placement.models == {"resnet": PlacedModel(2 << 30, 2, 3)}


POOL = '[[pool]]\nname = "a"\nmembers = ["h:1"]\n'
MODELS = '[[pool]]\nname = "a"\nmodels = "m"\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "cluster.toml: pool: there is none"),
        ("x = 1\n" + POOL, "cluster.toml:1: x: is not known. There are: router, pool."),
        ("[router]\nhtp-port = 1\n" + POOL, "cluster.toml:2: router.htp-port: is not known. Did you mean http-port?"),
        ("[router]\nhttp-port = 8001\n" + POOL, "is 8001 like that of another port"),
        ("[router]\nhttp-port = 70000\n" + POOL, "cluster.toml:2: router.http-port: must be a port"),
        ("[router]\ntimeout = 'soon'\n" + POOL, "router.timeout: must be a duration"),
        ("[router]\npaths = ['/v2/x']\n" + POOL, "router.paths: must be paths under /v1"),
        ("[router]\npaths = ['/v1/../v2/x']\n" + POOL, "router.paths: must be paths under /v1"),
        (f"[router]\ntimeout = 1{'0' * 400}\n" + POOL, "router.timeout: must be from 0 to 366 days"),
        (POOL + f"load-factor = 1{'0' * 400}", "pool.1.load-factor: must be a number of at most 300 digits"),
        ("router = 1\n" + POOL, "router: must be a table"),
        ("pool = 1", "pool: must be tables"),
        (POOL + 'kind = "vlm"', "cluster.toml:4: pool.1.kind: must be one of"),
        (POOL + 'kind = "vlm"', "Did you mean 'vllm'?"),
        (POOL + "load-factor = 0", "pool.1: load-factor is 0: it must be from 1 to 100"),
        (POOL + "[pool.ejection]\nmax-ejected = 2", "cluster.toml:4: pool.1.ejection: max-ejected is 2"),
        (POOL + POOL, "cluster.toml:5: pool.2.name: 'a' is the name of another pool"),
        (POOL + POOL.replace('"a"', '"b"'), "cluster.toml:6: pool.2.members: 'h:1' is already a member of pool 'a'"),
        (POOL + 'dns = "h:1"', "cluster.toml:1: pool.1: has members and dns: keep one of them"),
        ('[[pool]]\nname = "a"', "cluster.toml:1: pool.1: has no members. Write members"),
        (POOL + "replicas = 2", "cluster.toml:4: pool.1.replicas: has an effect with models only"),
        (POOL + "[pool.resources]", "cluster.toml:4: pool.1.resources: has an effect with models only"),
        (MODELS + "resources = 1", "pool.1.resources: must be a table"),
        (MODELS + "resources = { gpu = 1 }", "pool.1.resources.gpu: is not known. Did you mean gpus?"),
        (MODELS + "resources = { gpus = -1 }", "pool.1.resources.gpus: must be a number from 0"),
        (MODELS + "resources = { gpus = 1.5 }", "pool.1.resources.gpus: must be a whole number"),
        (MODELS + "resources = { custom = 1 }", "pool.1.resources.custom: must have a number for each resource"),
        (MODELS + "resources = { custom = { a = 'x' } }", "pool.1.resources.custom.a: must be a number"),
        (MODELS + "resources = { gpus = 1, engine-places-gpus = true }", "resources.gpus: has no effect with engine"),
        ('[[pool]]\nname = "a"\nray = "main"', "cluster.toml:3: pool.1.ray: must be NAME/POOL of a cluster"),
        (
            "[router]\nadmin-key = 'x'\n" + POOL,
            "cluster.toml:2: router.admin-key: must be HEADER=VALUE or HEADER=",
        ),
        (POOL.replace("h:1", "h"), "pool.1.members: entry 1 must be HOST:PORT"),
        (POOL.replace("h:1", "a..b:1"), "pool.1.members: entry 1 must be HOST:PORT"),
        (POOL.replace("h:1", f"{'x' * 64}:1"), "pool.1.members: entry 1 must be HOST:PORT"),
        ('[[pool]]\nname = "a"\ndns = "a..b:1"', "cluster.toml:3: pool.1.dns: must be HOST:PORT"),
        (POOL.replace('"h:1"', ""), "pool.1.members: must be a list of 1 to"),
        (POOL.replace('"h:1"', '{ htp = "h:1" }'), "entry 1 has an unknown key 'htp'. Did you mean http?"),
        (POOL.replace('"h:1"', '{ http = "h:1", capacity = 0 }'), "entry 1 capacity must be a number greater than 0"),
        (POOL.replace('"a"', '""'), "pool.1.name: must be 1 to 64 letters"),
        (POOL + "[pool.placement]", "cluster.toml:4: pool.1.placement: it is not known how much memory members have"),
        (
            POOL.replace('members = ["h:1"]', 'kubernetes = "s:http"') + "[pool.placement]",
            "how much memory members have",
        ),
        (POOL + "placement = 1", "pool.1.placement: must be a table"),
        (POOL + '[pool.placement]\nmemory = "2 cows"', "placement.memory: must be a size of memory, as in 512MiB"),
        (POOL + "[pool.placement]\ntarget = 0", "pool.1.placement: target is 0: it must be from 0.01"),
        (POOL + "[pool.placement]\nmenory = 1", "placement.menory: is not known. Did you mean memory?"),
        (POOL + "[pool.placement]\nkey = 'k'", "placement.key: must be HEADER=VALUE or HEADER=@FILE"),
        (POOL + "[pool.placement]\nmodels = 1", "placement.models: must have a table for each model"),
        (POOL + "[pool.placement.models.m]\nmots = 1", "cluster.toml:5: pool.1.placement.models.m.mots: is not known"),
        (POOL + "kind = 'vllm'\n[pool.placement]", "servers of kind vllm do not load models on request"),
        (POOL.replace('"h:1"', '{ http = "h:1", memory = "x" }'), "entry 1 memory must be a size of memory"),
        (POOL.replace('"h:1"', '{ http = "h:1", metrics = "x" }'), "entry 1 must be HOST:PORT"),
        (POOL + "hold-requests = -1", "pool.1.hold-requests: must be an integer from 0"),
        (POOL + "lends = -1", "cluster.toml:4: pool.1.lends: must be a number from 0"),
        (POOL + "reserve = 1.5", "cluster.toml:4: pool.1.reserve: must be an integer"),
        (POOL + 'preempts = "yes"', "cluster.toml:4: pool.1.preempts: must be true or false"),
        ('[[pool]]\nname = "a"\nmodels = "m"\ntls = true', "pool.1.tls: nerite up starts servers without TLS"),
        (POOL + "tls = 1", "cluster.toml:4: pool.1.tls: must be true, or a table"),
        (POOL + 'tls = { key = "k" }', "cluster.toml:4: pool.1.tls.key: has an effect with certificate only"),
        (
            POOL + '[pool.tls]\nserver-nam = "k"',
            "pool.1.tls.server-nam: is not known. Did you mean server-name?",
        ),
        ("router.tls = true\n" + POOL, "router.tls: must be a table: write [router.tls]"),
        ("[router.tls]\nkey = 'k'\n" + POOL, "cluster.toml:1: router.tls: has no certificate"),
        ("[router]\ncors-origins = ['app']\n" + POOL, "router.cors-origins: must be origins, as in"),
        ("[router]\nmax-bytes-in-flight = -1\n" + POOL, "router.max-bytes-in-flight: must be an integer from 0"),
        ("[", "cluster.toml: "),
    ],
)
def test_mistakes(text: str, told: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_cluster(text)
    assert told in caught.value.message


def test_tls_and_lending() -> None:
    text = (
        '[router]\ncors-origins = ["https://app.example", "*"]\nmax-bytes-in-flight = 1000\n'
        '[router.tls]\ncertificate = "s.pem"\nkey = "/k/s.key"\nclient-ca = "ca.pem"\n'
        + POOL
        + 'lends = 4\nreserve = 1\npreempts = true\ntls = { ca = "ca.pem", server-name = "members" }\n'
        + POOL.replace('"a"', '"b"').replace("h:1", "i:1")
        + "tls = true\n"
    )
    cluster = parse_cluster(text, "/etc/cluster.toml")
    assert cluster.router.tls == PortTls("/etc/s.pem", "/k/s.key", "/etc/ca.pem")
    assert cluster.router.cors_origins == ("https://app.example", "*")
    assert cluster.router.max_bytes_in_flight == 1000
    first, second = cluster.pools
    assert (first.lends, first.reserve, first.preempts) == (4, 1, True)
    assert (second.lends, second.reserve, second.preempts) == (1, 0, False)
    assert first.tls == MemberTls(ca="/etc/ca.pem", server_name="members")
    assert second.tls == MemberTls()


def test_all_mistakes_are_told_in_the_order_of_lines() -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_cluster("[[pool]]\nname = 1\nkind = 2\n[router]\nhttp-port = 'a'\nx = 1")
    lines = [int(line.split(":")[1]) for line in caught.value.message.splitlines()]
    assert lines == sorted(lines)
    assert len(lines) == 5


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_cluster(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_bytes(b"\xff")
    with pytest.raises(InvalidArgument, match="is not UTF-8 at byte 0"):
        read_cluster(str(tmp_path / "bad.toml"))


def test_members_in_text() -> None:
    text = (
        "# all\nhost-a:8000\n\n"
        "10.0.0.2:8000 capacity=2 name=two grpc=10.0.0.2:8001 memory=1GiB  # the large one\nb:1 drain=true\n"
    )
    assert members_of_text(text, "m", ServerKind.NERITE) == (
        Member("host-a:8000", "host-a:8000"),
        Member("two", "10.0.0.2:8000", "10.0.0.2:8001", ServerKind.NERITE, 2.0, 1 << 30),
        Member("b:1", "b:1", drain=True),
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a:1\nb", "m:2: the line must be HOST:PORT"),
        ("a:1 large", "m:1: the line has 'large' behind the address"),
        ("a:1\na:1", "m:2: the line names member 'a:1' a second time"),
        ("a:1 size=2", "m:1: the line has an unknown key 'size'"),
        ("a:1 grpc=", "m:1: the line must be HOST:PORT"),
        ("a:1 drain=1", "m:1: the line drain must be true or false"),
        ("a:0", "must be HOST:PORT"),
        ("[::z]:1", "has no IPv6 address between its brackets"),
    ],
)
def test_mistakes_in_members(text: str, told: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        members_of_text(text, "m", ServerKind.NERITE)
    assert told in caught.value.message


@given(
    st.from_regex(r"[a-z0-9][a-z0-9-]{0,9}(\.[a-z0-9-]{1,9}){0,2}\.?", fullmatch=True) | st.ip_addresses().map(str),
    st.integers(1, 65535),
)
def test_addresses(host: str, port: int) -> None:
    address = join_address(host, port)
    assert split_address(address) == (host, port)
    assert member_of(address, ServerKind.NERITE).http == address
