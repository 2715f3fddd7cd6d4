"""The logging extension: what is logged, and how, told and changed while the server runs."""

from conformance.exchange import Grpc, get, post
from conformance.exchanges.scenes import SHARED
from nerite.wire import grpc_service as pb

SCENE = SHARED
ALL = {"log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0, "log_format": "default"}


def change(**settings):
    return [post("/v2/logging", settings), get("/v2/logging"), post("/v2/logging", ALL)]


def raw(body):
    return [post("/v2/logging", body), get("/v2/logging"), post("/v2/logging", ALL)]


def grpc(**settings):
    request = pb.LogSettingsRequest()
    for name, value in settings.items():
        kind = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
        setattr(request.settings[name], kind, value)
    return [Grpc("LogSettings", request), post("/v2/logging", ALL)]


EXCHANGES = {
    "as it is": get("/v2/logging"),
    "nothing changed": change(),
    "no body": raw(b""),
    "broken": raw(b"{"),
    "a list": raw(b"[1]"),
    "a level off": change(log_info=False),
    "all levels off": change(log_info=False, log_warning=False, log_error=False),
    "details": change(log_verbose_level=2),
    "details beyond 32 bits": change(log_verbose_level=2**32),
    "details below zero": change(log_verbose_level=-1),
    "details as a text": change(log_verbose_level="1"),
    "details as a truth": change(log_verbose_level=True),
    "a level that is a number": change(log_info=1),
    "a level that is a text": change(log_warning="false"),
    "a level that is null": change(log_error=None),
    "a format": change(log_format="ISO8601"),
    "an unknown format": change(log_format="iso"),
    "a format that is a number": change(log_format=3),
    "a file": change(log_file="/tmp/log"),
    "the same file": change(log_file=""),
    "an unknown setting": change(colour="red"),
    "a good one and a bad one": change(log_info=False, log_format="iso"),
    "a bad one and a good one": raw(b'{"log_format": "iso", "log_info": false}'),
    "a known one and an unknown one": change(log_info=False, colour="red"),
    "the other method": post("/v2/logging/x", {}),
    "gRPC: as it is": grpc(),
    "gRPC: a level off": grpc(log_info=False),
    "gRPC: details": grpc(log_verbose_level=3),
    "gRPC: a format": grpc(log_format="ISO8601"),
    "gRPC: an unknown format": grpc(log_format="iso"),
    "gRPC: a file": grpc(log_file="/tmp/log"),
    "gRPC: an unknown setting": grpc(colour="red"),
    "gRPC: a level that is a text": grpc(log_info="false"),
    "gRPC: details as a truth": grpc(log_verbose_level=True),
    "gRPC: a format that is a number": grpc(log_format=3),
}
