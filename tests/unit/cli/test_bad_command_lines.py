"""Every message about a command line: Triton's text, in Triton's order."""

from __future__ import annotations

from pathlib import Path

import pytest

from nerite.cli.command import UsageError
from nerite.cli.command_line import TRITON, HelpRequested, parse_command_line

OUT_OF_BOUND = "Provided option value is out of bound. Got "
INVALID = "Invalid option value. Got "
SERVER = "error: creating server: Invalid argument - "
BUILD = "Failed to build Triton option:\nerror: "


def complaint(arguments: str, environment: dict[str, str] | None = None) -> UsageError:
    with pytest.raises(UsageError) as caught:
        parse_command_line(["--model-repository=/m", *arguments.split()], environment or {}, TRITON)
    return caught.value


def bad(flag: str, text: str) -> str:
    return f'Bad option: "{flag}".\n{text}'


# Before the usage, from getopt itself.
EARLY = {
    "--nosuch=1": "unrecognized option '--nosuch=1'",
    "--nosuch": "unrecognized option '--nosuch'",
    "--log=3": "option '--log=3' is ambiguous; possibilities: '--log-verbose' '--log-info' '--log-warning' "
    "'--log-error' '--log-format' '--log-file'",
    "--log-info": "option '--log-info' requires an argument",
    "--log-inf": "option '--log-info' requires an argument",
    "--help=3": "option '--help' doesn't allow an argument",
    "--disable-auto-complete-config=true": "option '--disable-auto-complete-config' doesn't allow an argument",
    "-x": "invalid option -- 'x'",
    "-xyz": "invalid option -- 'x'",
}


@pytest.mark.parametrize("arguments", EARLY)
def test_no_such_flag(arguments: str) -> None:
    error = complaint(arguments)
    assert error.text == f"tritonserver: {EARLY[arguments]}"
    assert error.early and error.usage


# After the usage.
LATE = {
    "pos": "Unexpected argument: pos",
    "-- --http-port=abc": "Unexpected argument: --http-port=abc",
    "-": "Unexpected argument: -",
    "--log-info=maybe": bad("--log-info", "invalid value for bool option: maybe"),
    "--log-info=": bad("--log-info", "invalid value for bool option: "),
    "--log-verbose=maybe": bad("--log-verbose", INVALID + "maybe"),
    "--log-format=iso8601": bad("--log-format", "invalid argument for --log-format"),
    "--http-port=abc": bad("--http-port", INVALID + "abc"),
    "--http-port=": bad("--http-port", INVALID),
    "--http-port=12x": bad("--http-port", INVALID + "12x"),
    "--http-port=1e3": bad("--http-port", INVALID + "1e3"),
    "--http-port=1_000": bad("--http-port", INVALID + "1_000"),
    "--http-port=99999999999": bad("--http-port", OUT_OF_BOUND + "99999999999"),
    "--http-port=65536": bad("--http-port", OUT_OF_BOUND + "65536"),
    "--http-port=-1": bad("--http-port", OUT_OF_BOUND + "-1"),
    "--http-por=abc": bad("--http-port", INVALID + "abc"),
    "--http-port --grpc-port=1": bad("--http-port", INVALID + "--grpc-port=1"),
    "--http-thread-count=2147483648": bad("--http-thread-count", OUT_OF_BOUND + "2147483648"),
    "--http-max-input-size=0": bad("--http-max-input-size", "Error: --http-max-input-size must be greater than 0."),
    "--http-max-input-size=-5": bad("--http-max-input-size", "Error: --http-max-input-size must be greater than 0."),
    "--http-header-forward-pattern=(": bad(
        "--http-header-forward-pattern",
        "invalid regular expression '(': missing ), unterminated subpattern at position 0",
    ),
    "--grpc-infer-thread-count=1": bad(
        "--grpc-infer-thread-count", "invalid argument for --grpc_infer_thread_count. Must be in the range 2 to 128."
    ),
    "--grpc-infer-thread-count=129": bad(
        "--grpc-infer-thread-count", "invalid argument for --grpc_infer_thread_count. Must be in the range 2 to 128."
    ),
    "--grpc-max-response-pool-size=0": bad(
        "--grpc-max-response-pool-size", "Error: --grpc-max-response-pool-size must be greater than 0."
    ),
    "--grpc-infer-response-compression-level=foo": bad(
        "--grpc-infer-response-compression-level", "invalid argument for --grpc_infer_response_compression_level"
    ),
    "--model-control-mode=foo": bad("--model-control-mode", "invalid argument for --model-control-mode"),
    "--model-config-name=": bad("--model-config-name", "Error: empty argument for --model-config-name"),
    "--rate-limit=foo": bad("--rate-limit", "invalid argument for --rate-limit"),
    "--rate-limit-resource=foo": bad(
        "--rate-limit-resource",
        "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or '<resource_name>:<count>'. "
        "Got foo",
    ),
    "--rate-limit-resource=foo:1:2:3": bad(
        "--rate-limit-resource",
        "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or '<resource_name>:<count>'. "
        "Got foo:1:2:3",
    ),
    "--rate-limit-resource=foo:x": bad("--rate-limit-resource", INVALID + "x"),
    "--min-supported-compute-capability=x": bad("--min-supported-compute-capability", INVALID + "x"),
    "--min-supported-compute-capability=1e999": bad("--min-supported-compute-capability", OUT_OF_BOUND + "1e999"),
    "--pinned-memory-pool-byte-size=99999999999999999999": bad(
        "--pinned-memory-pool-byte-size", OUT_OF_BOUND + "99999999999999999999"
    ),
    "--pinned-memory-pool-byte-size=" + "9" * 5000: bad("--pinned-memory-pool-byte-size", OUT_OF_BOUND + "9" * 5000),
    "--cuda-memory-pool-byte-size=3": bad(
        "--cuda-memory-pool-byte-size",
        "Cannot parse pair option due to incorrect number of inputs."
        "--<pair option> argument requires format <first>:<second>. Found: 3",
    ),
    "--cuda-memory-pool-byte-size=0:-1": bad("--cuda-memory-pool-byte-size", OUT_OF_BOUND + "-1"),
    "--model-load-gpu-limit=a:b": bad("--model-load-gpu-limit", INVALID + "a"),
    "--sagemaker-safe-port-range=9": bad(
        "--sagemaker-safe-port-range",
        "Cannot parse pair option due to incorrect number of inputs."
        "--<pair option> argument requires format <first>-<second>. Found: 9",
    ),
    "--rollout-baseline=resnet": bad(
        "--rollout-baseline",
        "--rollout-baseline option format is '<model>=<version>', such as resnet=1. Got resnet",
    ),
    "--rollout-baseline=resnet=0": bad(
        "--rollout-baseline",
        "--rollout-baseline option format is '<model>=<version>', such as resnet=1. Got resnet=0",
    ),
    "--host-policy=a": bad("--host-policy", "--host-policy option format is '<policy name>,<setting>=<value>'. Got a"),
    **{
        f"--http-cors-origin={text}": bad(
            "--http-cors-origin",
            "an origin is <scheme>://<host> or <scheme>://<host>:<port> with nothing behind it, or *. Got " + text,
        )
        for text in ("a.example", "https://a.example/", "https://a,https://b", "https://*.a", "null", "https://a:b")
    },
    "--http-restricted-api=foo:k=v": bad("--http-restricted-api", "unknown restricted api 'foo' "),
    "--http-restricted-api=health": bad(
        "--http-restricted-api",
        "--http-restricted-api option format is '<config name>:<setting>=<value>'. Got health",
    ),
    "--http-restricted-api=health:k=": bad(
        "--http-restricted-api",
        "--http-restricted-api option format is '<config name>:<setting>=<value>'. Got health:k=",
    ),
    "--http-restricted-api=health:k=v --http-restricted-api=metadata,health:k=v": bad(
        "--http-restricted-api", "restricted api 'health' can not be specified in multiple config groups"
    ),
    "--grpc-restricted-protocol=health,health:k=v": bad(
        "--grpc-restricted-protocol", "restricted protocol 'health' can not be specified in multiple config groups"
    ),
    "--grpc-restricted-protocol=foo:k=v": bad("--grpc-restricted-protocol", "unknown restricted protocol 'foo' "),
    "--grpc-restricted-protocol=metrics:k=v": bad(
        "--grpc-restricted-protocol", "unknown restricted protocol 'metrics' "
    ),
    "--http-restricted-api=health:k=@": bad(
        "--http-restricted-api",
        "--http-restricted-api option format is '<config name>:<setting>=<value>'. Got health:k=@. "
        "Behind '@' stands the path of a file with the keys",
    ),
    "--backend-config=,a=b": bad(
        "--backend-config",
        "No backend specified. --backend-config option format is <backend name>,<setting>=<value> or "
        "<setting>=<value>. Got ,a=b",
    ),
    "--backend-config=foo": bad(
        "--backend-config", "--backend-config option format is '<backend name>,<setting>=<value>'. Got foo"
    ),
    "--backend-config=python,foo": bad(
        "--backend-config", "--backend-config option format is '<backend name>,<setting>=<value>'. Got python,foo"
    ),
    "--backend-config=python,=3": bad(
        "--backend-config", "--backend-config option format is '<backend name>,<setting>=<value>'. Got python,=3"
    ),
    "--cache-config=local": bad(
        "--cache-config",
        "No cache specified. --cache-config option format is <cache name>,<setting>=<value>. Got local",
    ),
    "--cache-config=size=4": bad(
        "--cache-config",
        "No cache specified. --cache-config option format is <cache name>,<setting>=<value>. Got size=4",
    ),
    "--cache-config=local,size=": bad(
        "--cache-config", "--cache-config option format is '<cache name>,<setting>=<value>'. Got local,size="
    ),
    "--metrics-config=foo": bad("--metrics-config", "--metrics-config option format is <setting>=<value>. Got foo"),
    "--metrics-config=a,b=c": bad("--metrics-config", "--metrics-config option format is <setting>=<value>. Got a,b=c"),
    "--metrics-config=counter_latencies=foo": bad(
        "--metrics-config counter_latencies", "invalid value for bool option: foo"
    ),
    "--metrics-config=summary_quantiles=1.5:0.1": bad(
        "--metrics-config summary_quantiles", "a quantile is a number from 0 to 1. Got 1.5:0.1"
    ),
    "--metrics-config=summary_quantiles=x:0.1": bad(
        "--metrics-config summary_quantiles", "Invalid option value. Got x"
    ),
    "--metrics-config=summary_quantiles=foo": bad(
        "--metrics-config summary_quantiles",
        "Invalid option: [foo]. No ':' delimiter found. Expected format is <quantile>:<error>",
    ),
    "--trace-config=foo": bad(
        "--trace-config", "--trace-config option format is '<trace mode>,<setting>=<value>'. Got foo"
    ),
    "--trace-config=,a=b": bad(
        "--trace-config",
        "No trace mode specified. --trace-config option format is <trace mode>,<setting>=<value> or "
        "<setting>=<value>. Got ,a=b",
    ),
    "--trace-config=foo,a=b": bad(
        "--trace-config",
        'invalid value for trace mode option: foo. Available options are "triton" and "opentelemetry"',
    ),
    "--trace-config=mode=foo": bad(
        "--trace-config mode",
        'invalid value for trace mode option: foo. Available options are "triton" and "opentelemetry"',
    ),
    "--trace-config=level=foo": bad("--trace-config level", "invalid value for trace level option: foo"),
    "--trace-config=rate=foo": bad("--trace-config rate", INVALID + "foo"),
    "--trace-config=triton,log-frequency=x": bad("--trace-config triton,log-frequency", INVALID + "x"),
    "--trace-config=mode=opentelemetry --trace-config=opentelemetry,bsp_max_queue_size=x": bad(
        "--trace-config opentelemetry,bsp_max_queue_size", INVALID + "x"
    ),
    "--trace-config=mode=opentelemetry --trace-config=opentelemetry,bsp_schedule_delay=-1": bad(
        "--trace-config opentelemetry,bsp_schedule_delay", OUT_OF_BOUND + "-1"
    ),
    "--trace-config=mode=opentelemetry --trace-config=opentelemetry,resource=x": bad(
        "--trace-config opentelemetry,resource", "expects <key>=<value>. Got x"
    ),
    "--trace-level=foo": bad("--trace-level", "invalid value for trace level option: foo"),
    "--trace-rate=x": bad("--trace-rate", INVALID + "x"),
    "--load-model=x": "Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well.",
    "--cache-config=local,size=1 --response-cache-byte-size=4": "Error: Incompatible flags --response-cache-byte-size "
    "and --cache-config both provided. Please provide one or the other.",
    "--quota-redis=redis://h": "--quota-redis has no effect without --policy-file",
    "--http-port=8001": "The server cannot listen to HTTP requests and GRPC requests at the same address and port "
    "0.0.0.0:8001",
    "--metrics-port=8001": "The server cannot listen to GRPC requests and metrics requests at the same address and "
    "port 0.0.0.0:8001",
    "--allow-sagemaker=1 --sagemaker-port=8000": "The server cannot listen to HTTP requests and SageMaker requests at "
    "the same address and port 0.0.0.0:8000",
    "--allow-vertex-ai=1 --vertex-ai-port=8002": "The server cannot listen to metrics requests and Vertex AI requests "
    "at the same address and port 0.0.0.0:8002",
    "--sagemaker-safe-port-range=9-10 --allow-sagemaker=1": "The server cannot listen to HTTP requests at port 8000, "
    "allowed port range is [9, 10]",
    "--grpc-use-ssl=1": "--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key",
    "--http-use-ssl-mutual=1 --http-server-cert=c --http-server-key=k": "--http-use-ssl-mutual needs --http-root-cert",
}


@pytest.mark.parametrize("arguments", LATE)
def test_bad_value_or_combination(arguments: str) -> None:
    error = complaint(arguments)
    assert error.text == LATE[arguments]
    assert error.usage and not error.early


# Found when the server is made: no usage.
BARE = {
    "--model-load-gpu-limit=-1:0.5": BUILD
    + "setting model load GPU limit: Invalid argument - expects device ID >= 0, got -1",
    "--model-load-gpu-limit=0:-0.4": BUILD
    + "setting model load GPU limit: Invalid argument - expects limit fraction to be in range [0.0, 1.0], "
    "got -0.400000",
    "--host-policy=a,foo=1": BUILD
    + "setting host policy: Unsupported - Unsupported host policy setting 'foo' is specified, supported settings are "
    "'numa-node', 'cpu-cores'",
    "--cache-config=local,size=1 --cache-config=redis,host=x": SERVER
    + "found multiple cache configurations, but only a single cache is currently supported",
    "--load-model=* --load-model=x --model-control-mode=explicit": SERVER
    + "Wildcard model name '*' must be the ONLY startup model if specified at all.",
}


@pytest.mark.parametrize("arguments", BARE)
def test_found_late(arguments: str) -> None:
    error = complaint(arguments)
    assert error.text == BARE[arguments]
    assert not error.usage


def test_no_repository() -> None:
    with pytest.raises(UsageError) as caught:
        parse_command_line([], {}, TRITON)
    assert caught.value.text == SERVER + "--model-repository must be specified"
    assert "nerite serve ./models" in caught.value.remedy


@pytest.mark.parametrize(("name", "what"), [("hf:org/name@main", "the name of a model"), ("net.onnx", "a file")])
def test_a_model_is_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, what: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.onnx").touch()
    with pytest.raises(UsageError) as caught:
        parse_command_line([f"--model-repository={name}"], {}, TRITON)
    assert caught.value.text == f"{SERVER}'{name}' is {what}, and --model-repository takes directories of models"
    assert f"nerite serve {name};" in caught.value.remedy
    (tmp_path / "hf:org" / "name@main").mkdir(parents=True)
    assert parse_command_line(["--model-repository=hf:org/name@main"], {}, TRITON) is not None


# Of several mistakes the one that Triton names.
ORDER = {
    "--nosuch=1 pos --http-port=abc": "unrecognized option",
    "--http-port=abc --nosuch=1": 'Bad option: "--http-port"',
    "pos --http-port=abc": 'Bad option: "--http-port"',
    "--log-info=maybe --http-port=abc": 'Bad option: "--log-info"',
    "--http-port=8001 --load-model=x": "Use of '--load-model'",
    "--http-port=8001 pos": "Unexpected argument",
    "--trace-config=rate=x --load-model=x": "Use of '--load-model'",
    "--trace-config=rate=x --http-port=8001": 'Bad option: "--trace-config rate"',
    "--http-port=8001 --model-load-gpu-limit=-1:0": "The server cannot listen",
    "--http-port=abc --help": 'Bad option: "--http-port"',
}


@pytest.mark.parametrize("arguments", ORDER)
def test_which_mistake_is_named(arguments: str) -> None:
    assert ORDER[arguments] in complaint(arguments).text


def test_help_comes_first_if_it_stands_first() -> None:
    with pytest.raises(HelpRequested):
        parse_command_line(["--help", "--http-port=abc"], {}, TRITON)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("http-prot", "http-port"), ("model-repo-sitory", "model-repository"), ("log-verbsoe", "log-verbose")],
)
def test_did_you_mean(wrong: str, meant: str) -> None:
    assert complaint(f"--{wrong}=1").remedy == f"Did you mean '--{meant}'?"


def test_nothing_is_suggested_for_what_resembles_nothing() -> None:
    assert complaint("--qqqqqqqq=1").remedy == ""


def test_triton_stops_at_metrics_only_when_it_must() -> None:
    # Port 0 is free for all; other addresses do not meet.
    arguments = "--http-port=0 --grpc-port=0 --metrics-port=0"
    assert parse_command_line(["--model-repository=/m", *arguments.split()], {}, TRITON).options.http.port == 0
    arguments = "--http-port=8001 --http-address=127.0.0.1"
    assert parse_command_line(["--model-repository=/m", *arguments.split()], {}, TRITON).options.http.port == 8001
