from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from nerite.wire import grpc_service, health, model_config, schema

ROOT = Path(__file__).parents[3]


def test_checked_in_files_are_up_to_date() -> None:
    build = runpy.run_path(str(ROOT / "tools" / "build_wire.py"))
    stale = [path.name for path, content in build["compiled"]().items() if path.read_bytes() != content]
    assert stale == [], "run tools/build_wire.py"


def test_a_message_goes_there_and_back() -> None:
    request = grpc_service.ModelInferRequest(model_name="m", raw_input_contents=[b"\x01"])
    tensor = request.inputs.add(name="IN", datatype="UINT8", shape=[1])
    tensor.parameters["priority"].uint64_param = 7
    again = grpc_service.ModelInferRequest.FromString(request.SerializeToString())
    assert again == request
    assert again.inputs[0].parameters["priority"].WhichOneof("parameter_choice") == "uint64_param"


def test_nested_names() -> None:
    assert grpc_service.ModelInferRequest.InferInputTensor(name="x").name == "x"
    assert model_config.ModelInstanceGroup.KIND_CPU == 2
    assert health.HealthCheckResponse.ServingStatus.Name(1) == "SERVING"


def test_enums_of_a_file() -> None:
    assert model_config.TYPE_FP32 == model_config.DataType.Value("TYPE_FP32") == 11


def test_a_class_is_the_same_object_every_time() -> None:
    assert grpc_service.ModelInferRequest is grpc_service.ModelInferRequest


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match=r"grpc_service\.proto has no message or enum named 'Nope'"):
        grpc_service.Nope  # noqa: B018


def test_methods() -> None:
    methods = schema.methods()
    infer = methods["/inference.GRPCInferenceService/ModelInfer"]
    stream = methods["/inference.GRPCInferenceService/ModelStreamInfer"]
    assert (infer.request, infer.response) == (
        grpc_service.ModelInferRequest,
        grpc_service.ModelInferResponse,
    )
    assert (infer.client_streaming, infer.server_streaming) == (False, False)
    assert (stream.client_streaming, stream.server_streaming) == (True, True)
    assert methods["/grpc.health.v1.Health/Check"].response is health.HealthCheckResponse
    assert len(methods) == 21


def run(*lines: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("ours_first", [True, False])
def test_lives_beside_the_official_stubs(ours_first: bool) -> None:
    imports = [
        "from nerite.wire import grpc_service; grpc_service.ModelInferRequest",
        "from tritonclient.grpc import service_pb2",
    ]
    printed = run(
        *(imports if ours_first else reversed(imports)),
        "data = service_pb2.ModelInferRequest(model_name='m').SerializeToString()",
        "print(grpc_service.ModelInferRequest.FromString(data).model_name)",
    )
    assert printed == "m"


def test_nothing_is_loaded_before_it_is_used() -> None:
    printed = run(
        "from nerite.wire import grpc_service, model_config, health, schema",
        "print(schema.pool.cache_info().currsize)",
    )
    assert printed == "0"
