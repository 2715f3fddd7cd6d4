"""What flags mean together."""

from __future__ import annotations

import pytest

from nerite.cli.command_line import NERITE, TRITON, CommandLine, EntryPoint, parse_command_line
from nerite.config.options import ServerOptions


def run(arguments: str) -> CommandLine:
    return parse_command_line(["--model-repository=/m", *arguments.split()], {}, TRITON)


def options(arguments: str) -> ServerOptions:
    return run(arguments).options


def test_repositories_and_models_are_sets() -> None:
    repository = options(
        "--model-store=/z --model-repository=/a --model-store=/a "
        "--model-control-mode=explicit --load-model=b --load-model=a --load-model=b"
    ).repository
    assert repository.paths == ("/a", "/m", "/z")
    assert repository.startup_models == ("a", "b")


def test_the_poll_interval_counts_in_poll_mode_only() -> None:
    assert options("--repository-poll-secs=5").repository.poll_secs == 0
    assert options("--repository-poll-secs=5 --model-control-mode=poll").repository.poll_secs == 5
    assert options("--model-control-mode=poll").repository.poll_secs == 15


def test_the_last_of_several_values_wins() -> None:
    assert options("--http-port=1 --http-port=2").http.port == 2
    assert options("--cuda-memory-pool-byte-size=0:1 --cuda-memory-pool-byte-size=0:2").device.cuda_pool_bytes == {0: 2}


def test_the_first_gpu_limit_of_a_device_wins() -> None:
    limits = options("--model-load-gpu-limit=0:0.1 --model-load-gpu-limit=0:0.2").device.load_gpu_limits
    assert limits == {0: 0.1}


def test_metrics_have_an_interval_and_an_address() -> None:
    assert options("--metrics-interval-ms=100").metrics.interval_ms == 100
    assert options("--http-address=127.0.0.1").metrics.address == "127.0.0.1"
    assert options("--http-address=127.0.0.1 --metrics-address=::1").metrics.address == "::1"


ALL = "--allow-sagemaker=true --sagemaker-port=1 --allow-vertex-ai=true --vertex-ai-port=2"
ROUTES = {"AIP_PREDICT_ROUTE": "/predict", "AIP_HEALTH_ROUTE": "/health"}


def addresses(options: ServerOptions) -> list[str]:
    """Of HTTP, gRPC, metrics, SageMaker and Vertex AI."""
    services = (options.http, options.grpc, options.metrics, options.sagemaker, options.vertex)
    return [service.address for service in services]


@pytest.mark.parametrize(
    ("entry", "flags", "environment", "expected"),
    [
        # What a cloud calls is reached from outside.
        (NERITE, "", {}, ["127.0.0.1"] * 3 + ["0.0.0.0"] * 2),
        (TRITON, "", {}, ["0.0.0.0"] * 5),
        (NERITE, "--address=::", {}, ["::"] * 5),
        (NERITE, "", {"NERITE_ADDRESS": "0.0.0.0"}, ["0.0.0.0"] * 5),
        (TRITON, "--address=127.0.0.1", {}, ["127.0.0.1"] * 5),
        (NERITE, "--http-address=0.0.0.0", {}, ["0.0.0.0", "127.0.0.1"] + ["0.0.0.0"] * 3),
        (
            TRITON,
            "--address=::1 --grpc-address=0.0.0.0 --metrics-address=::",
            {},
            ["::1", "0.0.0.0", "::", "::1", "::1"],
        ),
    ],
)
def test_where_ports_listen(entry: EntryPoint, flags: str, environment: dict[str, str], expected: list[str]) -> None:
    arguments = ["--model-repository=/m", *ALL.split(), *flags.split()]
    assert addresses(parse_command_line(arguments, {**ROUTES, **environment}, entry).options) == expected


def test_ports() -> None:
    given = parse_command_line(["--model-repository=/m", "--metrics-port=3", *ALL.split()], ROUTES, TRITON).options
    assert (given.sagemaker.port, given.vertex.port, given.metrics.port) == (1, 2, 3)


def test_no_metrics_no_hardware_metrics() -> None:
    metrics = options("--allow-metrics=false").metrics
    assert (metrics.gpu, metrics.cpu) == (False, False)


def test_metrics_config() -> None:
    metrics = options(
        "--metrics-config=counter_latencies=false --metrics-config=summary_latencies=true "
        "--metrics-config=summary_quantiles=0.5:0.1,0.9:0.01"
    ).metrics
    assert (metrics.counter_latencies, metrics.histogram_latencies, metrics.summary_latencies) == (False, False, True)
    assert metrics.summary_quantiles == ((0.5, 0.1), (0.9, 0.01))


@pytest.mark.parametrize(
    ("text", "quantile"),
    [("5e-1:0.1", 0.5), ("0x1p-1:1", 0.5), ("0.5x:0.1y", 0.5), (",+.5:.1,", 0.5), ("1.:nan", 1.0), ("0:inf", 0.0)],
)
def test_quantiles_are_read_as_by_triton(text: str, quantile: float) -> None:
    """Triton has C's ``strtod`` read them, and leaves out what is empty."""
    ((read, _),) = options(f"--metrics-config=summary_quantiles={text}").metrics.summary_quantiles
    assert read == quantile


def test_settings_that_do_not_exist_are_warnings() -> None:
    assert run("--metrics-config=counter_latency=1").warnings == [
        "Warning: --metrics-config has no setting 'counter_latency'. Did you mean 'counter_latencies'?"
    ]
    assert run("--trace-config=triton,nosuch=1 --trace-config=xyz=1").warnings == [
        "Warning: --trace-config has no setting 'xyz'.",
        "Warning: --trace-config has no setting 'triton,nosuch'.",
    ]


def test_mutual_tls_is_tls() -> None:
    given = "--grpc-use-ssl-mutual=1 --grpc-server-cert=c --grpc-server-key=k --grpc-root-cert=r"
    tls = options(given).grpc.tls
    assert (tls.enabled, tls.mutual) == (True, True)
    assert not options(given).http.tls.enabled
    assert not options("--grpc-use-ssl-mutual=0").grpc.tls.enabled


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_header_patterns_ignore_case_unless_told_otherwise(protocol: str) -> None:
    def matches(pattern: str, name: str) -> bool:
        found = getattr(options(f"--{protocol}-header-forward-pattern={pattern}"), protocol).header_forward_pattern
        return bool(found.search(name))

    assert matches("my_header.*", "X-MY_HEADER1")
    assert not matches("(?-i)my_header", "MY_HEADER")
    assert matches("(?-i)my_header", "my_header")


def test_auto_complete() -> None:
    assert options("").repository.auto_complete
    assert not options("--disable-auto-complete-config").repository.auto_complete
    deprecated = (
        "Warning: '--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' instead."
    )
    strict = run("--strict-model-config=true")
    assert (strict.options.repository.auto_complete, strict.warnings) == (False, [deprecated])
    both = run("--disable-auto-complete-config --strict-model-config=false")
    assert not both.options.repository.auto_complete
    assert both.warnings == [
        deprecated,
        "Warning: Overriding deprecated '--strict-model-config' from False to True in favor of "
        "'--disable-auto-complete-config'!",
    ]


def test_cache() -> None:
    cache = options("--cache-config=local,size=1 --cache-config=local,x=y --cache-config=local,size=2").cache
    assert (cache.name, cache.settings) == ("local", {"size": "2", "x": "y"})
    old = run("--response-cache-byte-size=7")
    assert (old.options.cache.name, old.options.cache.settings) == ("local", {"size": "7"})
    assert old.warnings == [
        "Warning: '--response-cache-byte-size' has been deprecated! This will default to the 'local' cache "
        "implementation with the provided byte size for its config. Please use '--cache-config' instead. The "
        "equivalent --cache-config CLI args would be: '--cache-config=local,size=7'"
    ]


def test_trace_settings() -> None:
    trace = options(
        "--trace-config=level=timestamps --trace-config=level=TENSORS --trace-config=rate=5 --trace-config=count=9 "
        "--trace-config=triton,file=/t --trace-config=triton,log-frequency=3 --trace-config=opentelemetry,url=u"
    ).trace
    assert (trace.levels, trace.rate, trace.count) == (("TIMESTAMPS", "TENSORS"), 5, 9)
    assert (trace.file, trace.log_frequency) == ("/t", 3)
    assert trace.opentelemetry.url == "http://localhost:4318/v1/traces"


def test_opentelemetry_settings() -> None:
    trace = options(
        "--trace-config=mode=opentelemetry --trace-config=opentelemetry,url=http://c:1/v1/traces "
        "--trace-config=opentelemetry,resource=service.name=mine --trace-config=opentelemetry,resource=a=b=c"
    ).trace
    assert trace.mode == "opentelemetry"
    assert trace.opentelemetry.url == "http://c:1/v1/traces"
    assert trace.opentelemetry.resource == {"service.name": "mine", "a": "b=c"}


def test_off_adds_nothing_to_other_trace_levels() -> None:
    assert options("--trace-config=level=TENSORS --trace-config=level=OFF").trace.levels == ("TENSORS",)
    assert options("--trace-level=TENSORS --trace-level=OFF").trace.levels == ()


def test_old_trace_flags() -> None:
    old = run("--trace-level=MIN --trace-file=/t --trace-rate=2 --trace-count=3 --trace-log-frequency=4")
    trace = old.options.trace
    assert (trace.levels, trace.file, trace.rate, trace.count, trace.log_frequency) == (("TIMESTAMPS",), "/t", 2, 3, 4)
    assert old.warnings == [
        f"Warning: '--trace-{name}' has been deprecated and will be removed in future releases. Please use "
        f"'--trace-config {instead} instead."
        for name, instead in (
            ("level", "level=<OFF|TIMESTAMPS|TENSORS>"),
            ("file", "triton,file=<filepath>"),
            ("rate", "rate=<rate value>"),
            ("count", "count=<count value>"),
            ("log-frequency", "triton,log-frequency=<log frequency value>"),
        )
    ]


def test_new_trace_flags_go_before_old_ones() -> None:
    both = run(
        "--trace-rate=2 --trace-file=/old --trace-level=OFF --trace-config=rate=3 --trace-config=triton,file=/new "
        "--trace-config=level=TIMESTAMPS"
    )
    assert (both.options.trace.rate, both.options.trace.file) == (3, "/new")
    assert both.options.trace.levels == ()
    assert both.warnings[3:] == [
        "Warning: Overriding deprecated '--trace-rate' in favor of provided rate value in --trace-config!",
        "Warning: Overriding deprecated '--trace-level' in favor of provided level in --trace-config!",
        "Warning: Overriding deprecated '--trace-file' in favor of provided file in --trace-config!",
    ]


def test_idle_flags_are_those_that_were_meant_to_do_something() -> None:
    assert [flag.name for flag in run("").ineffective] == []
    used = run("--http-thread-count=4 --allow-sagemaker=false --grpc-infer-thread-count=3 --rate-limit=off").ineffective
    assert [flag.name for flag in used] == ["http-thread-count", "grpc-infer-thread-count"]
