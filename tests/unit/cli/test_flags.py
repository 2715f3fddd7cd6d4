"""The table of flags: complete, with Triton's defaults, readable in every way a flag can be given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nerite.cli.command import UsageError
from nerite.cli.command_line import NERITE, parse_command_line, usage
from nerite.cli.command_line import TRITON as TRITONSERVER
from nerite.cli.flags import BY_NAME, FLAGS, GROUPS, at, reference
from nerite.config.flag import AUTO
from nerite.config.options import ConnectionOptions, QueueOptions, ServerOptions

ROOT = Path(__file__).parents[3]

# Flag: default as Triton documents it, a legal value, and the value that has to come out (None: checked elsewhere).
TRITON = {
    "id": ("triton", "box", "box"),
    "exit-timeout-secs": (30, "5", 5),
    "log-verbose": (0, "2", 2),
    "log-info": (True, "off", False),
    "log-warning": (True, "0", False),
    "log-error": (True, "FALSE", False),
    "log-format": ("default", "ISO8601", "ISO8601"),
    "log-file": ("", "/tmp/x.log", "/tmp/x.log"),
    "model-repository": ((), "/models", ("/models",)),
    "model-store": ((), "/models", ("/models",)),
    "exit-on-error": (True, "false", False),
    "disable-auto-complete-config": (True, None, None),
    "strict-readiness": (True, "false", False),
    "model-control-mode": ("none", "EXPLICIT", "explicit"),
    "repository-poll-secs": (15, "5", 0),
    "load-model": ((), "m", None),
    "model-config-name": ("", "h100", "h100"),
    "model-load-thread-count": (4, "8", 8),
    "model-load-retry-count": (0, "2", 2),
    "model-namespacing": (False, "true", True),
    "enable-peer-access": (True, "false", False),
    "allow-http": (True, "false", False),
    "http-address": ("0.0.0.0", "::1", "::1"),
    "http-port": (8000, "9000", 9000),
    "reuse-http-port": (False, "true", True),
    "http-header-forward-pattern": (None, "x-.*", None),
    "http-thread-count": (8, "4", 4),
    "http-max-input-size": (67108864, "1024", 1024),
    "http-restricted-api": ({}, "health:k=v", {"health": ("k", "v")}),
    "allow-grpc": (True, "false", False),
    "grpc-address": ("0.0.0.0", "127.0.0.1", "127.0.0.1"),
    "grpc-port": (8001, "9001", 9001),
    "reuse-grpc-port": (False, "true", True),
    "grpc-header-forward-pattern": (None, "x-.*", None),
    "grpc-infer-thread-count": (2, "128", 128),
    "grpc-infer-allocation-pool-size": (8, "16", 16),
    "grpc-max-response-pool-size": (2**31 - 1, "1", 1),
    "grpc-use-ssl": (False, "false", False),
    "grpc-use-ssl-mutual": (False, "false", False),
    "grpc-server-cert": ("", "c.pem", "c.pem"),
    "grpc-server-key": ("", "k.pem", "k.pem"),
    "grpc-root-cert": ("", "r.pem", "r.pem"),
    "grpc-infer-response-compression-level": ("none", "High", "high"),
    "grpc-keepalive-time": (7200000, "1", 1),
    "grpc-keepalive-timeout": (20000, "1", 1),
    "grpc-keepalive-permit-without-calls": (False, "1", True),
    "grpc-http2-max-pings-without-data": (2, "0", 0),
    "grpc-http2-min-recv-ping-interval-without-data": (300000, "1", 1),
    "grpc-http2-max-ping-strikes": (2, "0", 0),
    "grpc-max-connection-age": (0, "1", 1),
    "grpc-max-connection-age-grace": (0, "1", 1),
    "grpc-restricted-protocol": (
        {},
        "inference,trace:k=v",
        {"inference": ("triton-grpc-protocol-k", "v"), "trace": ("triton-grpc-protocol-k", "v")},
    ),
    "allow-sagemaker": (False, "true", True),
    "sagemaker-port": (8080, "8081", 8081),
    "sagemaker-safe-port-range": (None, "9000-9010", (9000, 9010)),
    "sagemaker-thread-count": (8, "1", 1),
    "allow-vertex-ai": (False, "true", True),
    "vertex-ai-port": (8080, "8081", 8081),
    "vertex-ai-thread-count": (8, "1", 1),
    "vertex-ai-default-model": ("", "m", "m"),
    "allow-metrics": (True, "false", False),
    "allow-gpu-metrics": (True, "false", False),
    "allow-cpu-metrics": (True, "false", False),
    "metrics-address": ("0.0.0.0", "127.0.0.1", "127.0.0.1"),
    "metrics-port": (8002, "9002", 9002),
    "metrics-interval-ms": (2000, "500", 500),
    "metrics-config": (None, "counter_latencies=false", None),
    "trace-config": (None, "level=TIMESTAMPS", None),
    "backend-directory": ("/opt/tritonserver/backends", "/b", "/b"),
    "backend-config": ((), "python,a=b", (("python", "a", "b"),)),
    "repoagent-directory": ("/opt/tritonserver/repoagents", "/r", "/r"),
    "cache-config": (None, "local,size=10", None),
    "cache-directory": ("/opt/tritonserver/caches", "/c", "/c"),
    "rate-limit": ("off", "EXECUTION_COUNT", "execution_count"),
    "rate-limit-resource": ((), "R1:4:0", (("R1", 4, 0),)),
    "pinned-memory-pool-byte-size": (268435456, "0", 0),
    "cuda-memory-pool-byte-size": ({}, "0:4", {0: 4}),
    "cuda-virtual-address-size": ({}, "1:4", {1: 4}),
    "min-supported-compute-capability": (6.0, "7.5", 7.5),
    "buffer-manager-thread-count": (0, "2", 2),
    "host-policy": ((), "p,numa-node=0", (("p", "numa-node", "0"),)),
    "model-load-gpu-limit": ({}, "0:0.5", {0: 0.5}),
    "allow-client-shm": (False, "true", True),
    "strict-model-config": (None, "true", None),
    "response-cache-byte-size": (None, "10", None),
    "trace-file": (None, "/tmp/t", None),
    "trace-level": (None, "MAX", None),
    "trace-rate": (None, "1", None),
    "trace-count": (None, "1", None),
    "trace-log-frequency": (None, "1", None),
}
VALUED = [name for name, (_, value, _) in TRITON.items() if value is not None]
REPOSITORY = ["--model-repository=/models"]
EXTRA = {"load-model": ["--model-control-mode=explicit"]}
ROUTES = {"AIP_PREDICT_ROUTE": "/predict", "AIP_HEALTH_ROUTE": "/health"}
"""Without these there is no --allow-vertex-ai."""


def options(*arguments: str, environment: dict[str, str] | None = None) -> ServerOptions:
    return parse_command_line([*REPOSITORY, *arguments], {**ROUTES, **(environment or {})}, TRITONSERVER).options


def test_the_table_has_all_of_tritons_flags_and_ours() -> None:
    assert {flag.name for flag in FLAGS if not flag.ours} == {*TRITON, "help"}
    assert {flag.name for flag in FLAGS if flag.ours} == {
        "options-file",
        "address",
        "model-load-files",
        "access-log",
        "allow-console",
        "policy-file",
        "quota-redis",
        "demand-host-memory",
        "demand-gpu-memory",
        "demand-keep-alive",
        "demand-wait-seconds",
        "demand-max-waiting",
        "ledger",
        "router-key-file",
        "webhook-allowed-host",
        "rollout-state",
        "rollout-baseline",
        "openai-strict",
        "generation-config",
        "model-alias",
        "responses",
        "responses-storage-bytes",
        "responses-storage-number",
        "batches",
        "batch-files",
        "batch-concurrency",
        "batch-storage-bytes",
        "stay-awake-microseconds",
        "front-processes",
        "standby",
        "stall-seconds",
        "repository-cache-directory",
        "environment-directory",
        "max-queued-requests",
        "max-queue-seconds",
        "queue-burst-seconds",
        "http-json-half-precision",
        "http-upload-timeout",
        "grpc-upload-timeout",
        "grpc-max-message-size",
        "max-connections",
        "connection-idle-timeout",
        "exit-keepalive-secs",
        "max-bytes-in-flight",
        "http-cors-origin",
        "http-allowed-host",
        "http-use-ssl",
        "http-use-ssl-mutual",
        "http-server-cert",
        "http-server-key",
        "http-root-cert",
    }
    assert len(BY_NAME) == len(FLAGS)


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("*", "*"),
        ("https://App.Example", "https://app.example"),
        ("https://a.example:443", "https://a.example"),
        ("http://a.example:443", "http://a.example:443"),
        ("http://[::1]:80", "http://[::1]"),
        ("chrome-extension://abc", "chrome-extension://abc"),
    ],
)
def test_origins(text: str, origin: str) -> None:
    assert options(f"--http-cors-origin={text}").http.cors_origins == (origin,)
    both = options("--http-cors-origin=b://c", f"--http-cors-origin={text}").http.cors_origins
    assert set(both) == {"b://c", origin}


@pytest.mark.parametrize(
    ("text", "name"), [("*", "*"), ("Models.Example.", "models.example"), ("my_host-1", "my_host-1")]
)
def test_names_of_hosts(text: str, name: str) -> None:
    assert options(f"--http-allowed-host={text}").http.allowed_hosts == (name,)


@pytest.mark.parametrize("text", ["http://a.example", "a.example:8000", "*.example", "", "a b"])
def test_what_is_no_name_of_a_host(text: str) -> None:
    with pytest.raises(UsageError, match="a host is a name without scheme and port"):
        options("--http-allowed-host", text)


def test_bounds_of_queues() -> None:
    assert options().queue == QueueOptions()
    given = options("--max-queued-requests=0", "--max-queue-seconds=1.5", "--queue-burst-seconds=0")
    assert given.queue == QueueOptions(0, 1.5, 0)
    with pytest.raises(UsageError, match=r"out of bound. Got -1"):
        options("--max-queue-seconds=-1")


def test_time_awake() -> None:
    assert options("--stay-awake-microseconds=1000").stay_awake_microseconds == 1000


def test_bounds_of_batches() -> None:
    given = options("--batch-concurrency=3", "--batch-storage-bytes=12000").batches
    assert (given.concurrency, given.storage_bytes) == (3, 12000)


@pytest.mark.parametrize(("text", "count"), [("1", 1), ("64", 64), ("auto", AUTO)])
def test_numbers_of_front_processes(text: str, count: int) -> None:
    assert options("--front-processes", text).front_processes == count
    assert options(environment={"NERITE_FRONT_PROCESSES": text}).front_processes == count
    assert options().front_processes == 1


@pytest.mark.parametrize("text", ["0", "65", "-1", "2.5", "many", "", "AUTO"])
def test_what_is_no_number_of_front_processes(text: str) -> None:
    remedy = "Give a number from 1, for a single process, to 64, or 'auto'"
    with pytest.raises(UsageError, match=f"Got {text}. {remedy}"):
        options(f"--front-processes={text}")


def test_bounds_of_connections() -> None:
    assert options().connections == ConnectionOptions()
    given = options("--max-connections=7", "--connection-idle-timeout=0", "--max-bytes-in-flight=1000000000000")
    assert given.connections == ConnectionOptions(7, 0, 10**12)
    assert options("--max-bytes-in-flight=0").connections.max_bytes_in_flight == 0
    with pytest.raises(UsageError, match="--max-bytes-in-flight must not be negative"):
        options("--max-bytes-in-flight=-1")


def test_bounds_of_messages() -> None:
    assert (options().grpc.max_message_size, options().grpc.upload_seconds) == (256 * 2**20, 60)
    given = options("--grpc-max-message-size=2147483647", "--grpc-upload-timeout=0").grpc
    assert (given.max_message_size, given.upload_seconds) == (2**31 - 1, 0)
    for flag in ("--grpc-max-message-size=0", "--grpc-max-message-size=2147483648", "--grpc-upload-timeout=-1"):
        with pytest.raises(UsageError):
            options(flag)


def test_groups_stand_in_tritons_order() -> None:
    triton = "Server,Logging,Model Repository,HTTP,GRPC,Sagemaker,Vertex,Metrics,Tracing,Backend,Repository Agent"
    triton += ",Response Cache,Rate Limiter,Memory/Device Management,Shared Memory,Nerite,DEPRECATED"
    assert list(GROUPS) == ["", *triton.split(",")]


@pytest.mark.parametrize("name", [name for name in TRITON if BY_NAME[name].field])
def test_default(name: str) -> None:
    assert at(ServerOptions(), BY_NAME[name].field) == TRITON[name][0]


@pytest.mark.parametrize("apart", [False, True], ids=["joined", "apart"])
@pytest.mark.parametrize("name", VALUED)
def test_value(name: str, apart: bool) -> None:
    _, text, value = TRITON[name]
    given = [f"--{name}", text] if apart else [f"--{name}={text}"]
    found = options(*given, *EXTRA.get(name, []))
    assert found == options(*given, *EXTRA.get(name, []), environment={"UNRELATED": "1"})
    if value is not None and BY_NAME[name].field:
        assert at(found, BY_NAME[name].field) == value


@pytest.mark.parametrize("name", VALUED)
def test_the_environment_means_the_same(name: str) -> None:
    variable = BY_NAME[name].environment
    assert variable == "NERITE_" + name.upper().replace("-", "_")
    text = TRITON[name][1]
    extra = EXTRA.get(name, [])
    assert options(*extra, environment={variable: text}) == options(f"--{name}={text}", *extra)


# Their legal values above are those of the base line, or count only together with other flags.
UNSEEN = {"model-repository", "model-store", "repository-poll-secs", "grpc-use-ssl", "grpc-use-ssl-mutual"}


@pytest.mark.parametrize("name", [name for name in VALUED if name not in UNSEEN])
def test_a_value_changes_the_options(name: str) -> None:
    extra = EXTRA.get(name, [])
    assert options(f"--{name}={TRITON[name][1]}", *extra) != options()


@pytest.mark.parametrize("width", [50, 80, 120])
def test_help_names_every_flag_and_keeps_to_the_width(width: int) -> None:
    lines = usage(NERITE, width).split("\n")
    for flag in FLAGS:
        assert any(line.split()[:1] == [f"--{flag.name}"] for line in lines), flag.name
    for group in GROUPS[1:]:
        assert f"{group}:" in lines
    assert all(len(line) <= max(width, 80) for line in lines)


def test_help_shows_defaults_and_what_has_no_effect() -> None:
    text = usage(TRITONSERVER, 120)
    assert "Port to listen on; 0 picks a free one. Default: 8001." in text
    assert "Address to listen on. Default: that of --http-address." in text
    assert "Default: 8. (No effect: one event loop serves every connection.)" in text


def test_the_reference_is_up_to_date() -> None:
    page = ROOT / "docs" / "flags.md"
    assert page.read_text(encoding="utf-8") == reference(), "run: python -m nerite.cli.flags > docs/flags.md"


def test_the_reference_prints_itself() -> None:
    done = subprocess.run([sys.executable, "-m", "nerite.cli.flags"], capture_output=True, text=True, check=True)
    assert done.stdout == reference()
    for flag in FLAGS:
        assert flag.name == "help" or f"| `--{flag.name}` |" in done.stdout
