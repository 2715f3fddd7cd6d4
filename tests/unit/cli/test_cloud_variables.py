"""What SageMaker, Vertex AI and Knative tell a server by its environment."""

from __future__ import annotations

import pytest
from command_lines import run, wrong

ROUTES = {"AIP_PREDICT_ROUTE": "/predict", "AIP_HEALTH_ROUTE": "/health"}


def test_vertex() -> None:
    environment = {"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "9999", "AIP_STORAGE_URI": "/storage", **ROUTES}
    options = run(**environment).options
    assert (options.vertex.enabled, options.http.enabled, options.grpc.enabled) == (True, False, False)
    assert (options.vertex.port, options.vertex.predict_route, options.vertex.health_route) == (
        9999,
        "/predict",
        "/health",
    )
    assert options.repository.paths == ("/storage",)
    options = run("/m", "--allow-http=true", "--vertex-ai-port=1", **environment).options
    assert (options.http.enabled, options.vertex.port, options.repository.paths) == (True, 1, ("/m",))
    assert wrong(AIP_HTTP_PORT="x").text == 'Bad option: "AIP_HTTP_PORT".\nInvalid option value. Got x'


def test_vertex_needs_its_routes() -> None:
    missing = "failed to start Vertex AI service: Invalid argument - {} is not defined for Vertex AI endpoint"
    error = wrong(AIP_MODE="PREDICTION")
    assert error.text == missing.format("API_PREDICT_ROUTE")
    assert error.remedy.endswith("AIP_PREDICT_ROUTE=/predict")
    error = wrong("--allow-vertex-ai=true", AIP_PREDICT_ROUTE="/p", AIP_HEALTH_ROUTE="")
    assert error.text == missing.format("AIP_HEALTH_ROUTE")
    assert error.remedy.endswith("AIP_HEALTH_ROUTE=/health")
    assert run("/m", "--allow-vertex-ai=false", AIP_MODE="PREDICTION").options.vertex.predict_route == ""


def test_knative() -> None:
    assert run("/m", K_SERVICE="nerite", PORT="8080").options.http.port == 8080
    assert run("/m", "--http-port=1", K_SERVICE="nerite", PORT="8080").options.http.port == 1
    assert run("/m", PORT="8080").options.http.port == 8000
    assert wrong("/m", K_SERVICE="nerite", PORT="x").text == 'Bad option: "PORT".\nInvalid option value. Got x'


def test_sagemaker() -> None:
    environment = {
        "SAGEMAKER_TRITON_PING_MODE": "live",
        "SAGEMAKER_TRITON_INFERENCE_TYPE": "generate",
        "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "m",
    }
    found = run("/m", "--allow-sagemaker=true", **environment).options.sagemaker
    assert (found.ping_mode, found.inference_type, found.default_model) == ("live", "generate", "m")
    found = run("/m", "--allow-sagemaker=true", SAGEMAKER_TRITON_PING_MODE="").options.sagemaker
    assert (found.ping_mode, found.inference_type) == ("ready", "infer")
    assert found.default_model == "unspecified_SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"


@pytest.mark.parametrize(
    ("name", "values"),
    [("PING_MODE", "ready or live"), ("INFERENCE_TYPE", "infer, generate or generate_stream")],
)
def test_a_bad_variable_of_sagemaker(name: str, values: str) -> None:
    environment = {f"SAGEMAKER_TRITON_{name}": "y"}
    error = wrong("--allow-sagemaker=true", **environment)
    assert error.text == f'Bad option: "SAGEMAKER_TRITON_{name}".\nInvalid option value. Got y'
    assert error.remedy == f"It may be {values}."
    assert run("/m", **environment).options == run("/m").options
