"""Trace and log settings."""

from typing import Any

from conformance.stock import GRPC, StockClient, exercise


def trace(client: StockClient, answer: Any) -> dict[str, list[str]]:
    """Return trace settings in one form: gRPC's are lists in messages, of which HTTP has the one value."""
    if client.is_grpc:
        return {name: setting.get("value", []) for name, setting in answer["settings"].items()}
    return {name: value if isinstance(value, list) else [value] for name, value in answer.items()}


def log(client: StockClient, answer: Any) -> dict[str, Any]:
    """Return log settings in one form: gRPC's are messages that name the type of their value."""
    if client.is_grpc:
        return {name: next(iter(setting.values())) for name, setting in answer["settings"].items()}
    return answer


@exercise("get_trace_settings")
def trace_settings(client: StockClient) -> None:
    settings = trace(client, client.told("get_trace_settings"))
    assert settings["trace_level"] == ["OFF"]
    assert settings["trace_rate"] == ["1000"]


@exercise("get_trace_settings")
def trace_settings_of_a_model(client: StockClient) -> None:
    assert trace(client, client.told("get_trace_settings", "echo"))["trace_level"] == ["OFF"]


@exercise("get_trace_settings", *GRPC)
def trace_settings_as_a_message(client: StockClient) -> None:
    assert list(client.get_trace_settings().settings["trace_level"].value) == ["OFF"]


@exercise("update_trace_settings")
def change_trace_settings(client: StockClient) -> None:
    changed = client.told("update_trace_settings", settings={"trace_rate": "7", "log_frequency": "3"})
    assert trace(client, changed)["trace_rate"] == ["7"]
    cleared = client.told("update_trace_settings", settings={"trace_rate": None, "log_frequency": None})
    assert trace(client, cleared)["trace_rate"] == ["1000"]


@exercise("update_trace_settings")
def change_trace_settings_of_a_model(client: StockClient) -> None:
    changed = client.told("update_trace_settings", "echo", {"trace_rate": "9"})
    assert trace(client, changed)["trace_rate"] == ["9"]
    assert trace(client, client.told("get_trace_settings"))["trace_rate"] == ["1000"]
    client.update_trace_settings("echo", {"trace_rate": None})
    assert trace(client, client.told("get_trace_settings", "echo"))["trace_rate"] == ["1000"]


@exercise("update_trace_settings")
def change_trace_settings_to_nonsense(client: StockClient) -> None:
    status, text = client.refused("update_trace_settings", settings={"trace_rate": "often"})
    assert status == ("INVALID_ARGUMENT" if client.is_grpc else "400")
    assert "Unable to parse 'trace_rate', got: often" in text


@exercise("get_log_settings")
def log_settings(client: StockClient) -> None:
    settings = log(client, client.told("get_log_settings"))
    assert (settings["log_info"], settings["log_verbose_level"], settings["log_format"]) == (True, 0, "default")


@exercise("get_log_settings", *GRPC)
def log_settings_as_a_message(client: StockClient) -> None:
    assert client.get_log_settings().settings["log_warning"].bool_param is True


@exercise("update_log_settings")
def change_log_settings(client: StockClient) -> None:
    changed = client.told("update_log_settings", {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"})
    assert log(client, changed)["log_verbose_level"] == 2
    restored = client.told("update_log_settings", {"log_info": True, "log_verbose_level": 0, "log_format": "default"})
    assert log(client, restored)["log_info"] is True


@exercise("update_log_settings")
def change_log_settings_to_nonsense(client: StockClient) -> None:
    status, text = client.refused("update_log_settings", {"log_format": "nonsense"})
    assert status == ("INVALID_ARGUMENT" if client.is_grpc else "503")
    assert "invalid argument for" in text
    assert "nonsense" in text
