"""The trace extension where traces go to an OpenTelemetry collector."""

from conformance.exchange import Grpc, get, post
from conformance.exchanges.scenes import TELEMETRY
from nerite.wire import grpc_service as pb

SCENE = TELEMETRY
ALL = "/v2/trace/setting"
BACK = post(ALL, dict.fromkeys(("trace_level", "trace_rate", "trace_count")))


def change(**settings):
    return [post(ALL, settings), get("/v2/models/echo/trace/setting"), BACK]


EXCHANGES = {
    "as it is": get(ALL),
    "as it is for a model": get("/v2/models/echo/trace/setting"),
    "gRPC: as it is": Grpc("TraceSetting", pb.TraceSettingRequest()),
    "gRPC: as it is for a model": Grpc("TraceSetting", pb.TraceSettingRequest(model_name="echo")),
    "a rate": change(trace_rate="5"),
    "a rate of zero": change(trace_rate="0"),
    "on, with a rate of zero": change(trace_level=["TIMESTAMPS"], trace_rate="0"),
    "on": change(trace_level=["TIMESTAMPS"]),
    "tensors": change(trace_level=["TENSORS"]),
    "on, with a count of zero": change(trace_level=["TIMESTAMPS"], trace_count="0"),
    "a frequency": change(log_frequency="3"),
    "the file": change(trace_file="x"),
    "the collector": change(url="x"),
    "the mode": change(trace_mode="triton"),
}
