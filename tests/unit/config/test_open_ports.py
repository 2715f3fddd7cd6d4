"""Which ports allow anybody to command a server, and what is said of them."""

from __future__ import annotations

import pytest

from nerite.cli.command_line import NERITE, TRITON, parse_command_line
from nerite.config import open_ports as exposure
from nerite.config.open_ports import OpenPort

KEY = "X-Key=secret"
TLS = "--{0}-use-ssl-mutual=true --{0}-server-cert=c --{0}-server-key=k --{0}-root-cert=r"
HTTP_FLAG, GRPC_FLAG = "http-restricted-api", "grpc-restricted-protocol"


def found(flags: str) -> list[OpenPort]:
    return exposure.open_ports(parse_command_line(["--model-repository=/m", *flags.split()], {}, TRITON).options)


def open_at(flags: str) -> dict[str, str]:
    return {port.service: ",".join(port.categories) for port in found(flags)}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"HTTP": "trace,logging", "gRPC": "trace,logging"}),
        ("--model-control-mode=poll", {"HTTP": "trace,logging", "gRPC": "trace,logging"}),
        ("--address=127.0.0.1", {}),
        ("--http-address=::1 --grpc-address=localhost", {}),
        ("--allow-http=false --allow-grpc=false", {}),
        ("--model-control-mode=explicit --allow-grpc=false", {"HTTP": "model-repository,trace,logging"}),
        ("--allow-client-shm=true --http-address=127.1.2.3", {"gRPC": "shared-memory,trace,logging"}),
        (f"--http-restricted-api=trace,logging:{KEY} --allow-grpc=false", {}),
        (f"--http-restricted-api=inference:{KEY} --allow-grpc=false", {"HTTP": "trace,logging"}),
        (f"--grpc-restricted-protocol=trace:{KEY} --allow-http=false", {"gRPC": "logging"}),
        (f"{TLS.format('http')} {TLS.format('grpc')}", {}),
        ("--address=127.0.0.1 --allow-sagemaker=true --model-control-mode=explicit", {}),
        (
            "--http-address=127.0.0.1 --allow-grpc=false --allow-sagemaker=true --model-control-mode=explicit",
            {"SageMaker": "model-repository"},
        ),
        ("--http-address=127.0.0.1 --allow-grpc=false --allow-sagemaker=true", {}),
        (
            "--http-address=127.0.0.1 --allow-grpc=false --allow-sagemaker=true --model-control-mode=explicit "
            f"--http-restricted-api=model-repository:{KEY}",
            {},
        ),
    ],
)
def test_what_is_open(flags: str, expected: dict[str, str]) -> None:
    assert open_at(flags) == expected


def test_nerite_serve_is_open_to_this_machine_alone() -> None:
    assert exposure.open_ports(parse_command_line(["/m", "--model-control-mode=explicit"], {}, NERITE).options) == []


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.255.0.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("1.127.0.0", False),
    ],
)
def test_loopback(address: str, loopback: bool) -> None:
    assert exposure.is_loopback(address) is loopback


def test_what_is_said() -> None:
    ports = found("--model-control-mode=explicit --grpc-port=0")
    assert exposure.rights(ports) == (
        "anyone who can connect to HTTP (0.0.0.0:8000) or gRPC (0.0.0.0) may load and unload models, and so run code "
        "as the user of the server; change what is traced; change what is logged"
    )
    assert exposure.remedy(ports) == (
        "Require a key (--http-restricted-api=model-repository,trace,logging:HEADER=@KEYFILE "
        "--grpc-restricted-protocol=model-repository,trace,logging:HEADER=@KEYFILE), "
        "or accept only connections from this machine (--address=127.0.0.1)."
    )
    assert "run code" not in exposure.rights(found(""))


def test_the_remedy_is_one() -> None:
    ports = found("--model-control-mode=explicit --allow-client-shm=true --allow-sagemaker=true")
    flags = exposure.remedy(ports).partition("(")[2].partition(")")[0].split()
    given = " ".join(flag.replace("HEADER=@KEYFILE", KEY) for flag in flags)
    assert open_at("--model-control-mode=explicit --allow-client-shm=true --allow-sagemaker=true " + given) == {}
