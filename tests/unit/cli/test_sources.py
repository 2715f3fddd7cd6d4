"""Flag before environment before file before default; and what is wrong in the environment and the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_lines import run, wrong


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "options.toml"
    path.write_text('model-repository = "/from-file"\nhttp-port = 3\ngrpc-port = 3001\nid = "file"\n')
    return path


def test_precedence(file: Path) -> None:
    options = run("--http-port=1", NERITE_HTTP_PORT="2", NERITE_GRPC_PORT="2001", NERITE_OPTIONS_FILE=str(file)).options
    assert (options.http.port, options.grpc.port, options.id, options.metrics.port) == (1, 2001, "file", 8002)
    assert options.repository.paths == ("/from-file",)


def test_a_repeated_flag_is_taken_from_one_source(file: Path) -> None:
    assert run("/b", "--model-repository=/a", "/b", f"--options-file={file}").options.repository.paths == ("/a", "/b")
    environment = {"NERITE_MODEL_REPOSITORY": "/d\n/c", "NERITE_OPTIONS_FILE": str(file)}
    assert run(**environment).options.repository.paths == ("/c", "/d")


def test_the_file_on_the_command_line_goes_before_that_of_the_environment(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text('id = "other"')
    assert run("/m", f"--options-file={other}", NERITE_OPTIONS_FILE=str(file)).options.id == "other"


def test_types_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "o.toml"
    path.write_text(
        """
        strict-readiness = false
        disable-auto-complete-config = true
        metrics-interval-ms = 250.5
        "log-verbose" = 2
        backend-config = ["default-max-batch-size=8", "python,a=b"]
        """
    )
    options = run("/m", f"--options-file={path}").options
    assert not options.repository.strict_readiness
    assert not options.repository.auto_complete
    assert options.metrics.interval_ms == 250.5
    assert options.log.verbose == 2
    assert options.settings_of("python") == {
        "auto-complete-config": "false",
        "backend-directory": "/opt/tritonserver/backends",
        "min-compute-capability": "6.000000",
        "default-max-batch-size": "8",
        "environment-directory": "",
        "a": "b",
    }
    assert "a" not in options.settings_of("onnxruntime")
    assert options.settings_of("fil")["default-max-batch-size"] == "8"


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("\nhttp-prot = 1", "unknown option 'http-prot' in {file}:2", "Did you mean 'http-port'?"),
        ("[http]\nport = 1", "unknown option 'http' in {file}:1", "Did you mean 'http-port'?"),
        ("http-port = 'x'", 'Bad option: "http-port in {file}:1".\nInvalid option value. Got x', ""),
        ("id = 1\n'http-port' = [1]", "option 'http-port' in {file}:2 cannot be a list", ""),
        ("http-port.x = 1", "option 'http-port' in {file}:1 cannot be a table", ""),
        ("http-port = 2020-01-01", "option 'http-port' in {file}:1 cannot be a date or time", ""),
        ("load-model = [[1]]", "option 'load-model' in {file}:1 cannot be a list", ""),
        ("options-file = 'x'", "option 'options-file' in {file}:1 has a meaning on the command line only", ""),
        ("help = true", "option 'help' in {file}:1 has a meaning on the command line only", ""),
        ("http-port = ", "{file}: Invalid value (at end of document)", ""),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, text: str, message: str, remedy: str) -> None:
    path = tmp_path / "o.toml"
    path.write_text(text)
    error = wrong(f"--options-file={path}")
    assert error.text == message.format(file=path)
    assert error.remedy == remedy


def test_a_file_of_brackets(tmp_path: Path) -> None:
    path = tmp_path / "o.toml"
    path.write_text("x = " + "[" * 5_000)
    assert wrong(f"--options-file={path}").text.startswith(f"{path}: maximum recursion depth exceeded")


def test_a_file_that_is_not_there() -> None:
    assert wrong("--options-file=/no/such").text == "cannot read the options file '/no/such': No such file or directory"


def test_a_bad_value_in_the_environment() -> None:
    error = wrong(NERITE_HTTP_PORT="abc")
    assert error.text == 'Bad option: "NERITE_HTTP_PORT".\nInvalid option value. Got abc'


def test_empty_is_not_set_and_service_links_are_not_ours() -> None:
    environment = {
        "NERITE_HTTP_PORT": "",
        "NERITE_METRICS_PORT": "tcp://10.0.0.7:8002",
        "NERITE_SERVICE_HOST": "10.0.0.7",
        "NERITE_PORT_8000_TCP_ADDR": "10.0.0.7",
        "HTTP_PORT": "1",
    }
    assert run("/m", **environment) == run("/m")


def test_a_misspelt_variable_is_a_warning() -> None:
    assert run("/m", NERITE_HTTP_PROT="1").warnings == [
        "Warning: environment variable NERITE_HTTP_PROT has no meaning; did you mean NERITE_HTTP_PORT?"
    ]


@pytest.mark.parametrize("value", ["1", "2048"])
def test_opentelemetrys_own_variables(value: str) -> None:
    trace = run("/m", "--trace-config=mode=opentelemetry", OTEL_BSP_MAX_QUEUE_SIZE=value).options.trace
    assert trace.opentelemetry.bsp_max_queue_size == int(value)
    flag = "--trace-config=opentelemetry,bsp_max_queue_size=7"
    trace = run("/m", "--trace-config=mode=opentelemetry", flag, OTEL_BSP_MAX_QUEUE_SIZE=value).options.trace
    assert trace.opentelemetry.bsp_max_queue_size == 7


@pytest.mark.parametrize("name", ["MAX_QUEUE_SIZE", "SCHEDULE_DELAY", "MAX_EXPORT_BATCH_SIZE"])
def test_a_bad_variable_of_opentelemetry(name: str) -> None:
    environment = {f"OTEL_BSP_{name}": "y"}
    error = wrong("--trace-config=mode=opentelemetry", **environment)
    assert error.text == f'Bad option: "OTEL_BSP_{name}".\nInvalid option value. Got y'
    assert run("/m", **environment).options == run("/m").options
