"""Plugins, which put headers on each request; and requests whose bytes the caller sends himself."""

import json

import numpy as np
from tritonclient.http.auth import BasicAuth

from conformance.stock import StockClient, exercise


@exercise("register_plugin")
@exercise("plugin")
@exercise("unregister_plugin")
def basic_authentication(client: StockClient) -> None:
    def authorization() -> str | None:
        result = client.infer("request", [client.tensor("IN", np.array([1], np.int32))])
        parameters = json.loads(result.as_numpy("REQUEST")[0])["parameters"]
        return {name.lower(): value for name, value in parameters.items()}.get("authorization")

    auth = BasicAuth("ann", "secret")
    assert client.plugin() is None
    client.register_plugin(auth)
    try:
        assert client.plugin() is auth
        assert authorization() == "Basic YW5uOnNlY3JldA=="
        assert client.is_server_live()
        assert "already registered" in client.refused("register_plugin", auth)[1]
    finally:
        client.unregister_plugin()
    assert authorization() is None
    assert "No plugin" in client.refused("unregister_plugin")[1]


@exercise("generate_request_body")
@exercise("parse_response_body")
def bodies(client: StockClient) -> None:
    pair = np.array([[3, 4]], np.int32)
    for binary in (True, False):
        body, length = client.generate_request_body(
            [client.tensor("IN", pair, binary_data=binary)],
            outputs=[client.tensors.InferRequestedOutput("OUT", binary_data=binary)],
            request_id="r",
        )
        assert (length is not None) is binary
        headers = {"Inference-Header-Content-Length": str(length)} if binary else {}
        status, answered, content = client.server.ask("POST", "/v2/models/echo/infer", body, **headers)
        assert status == 200
        told = {name.lower(): value for name, value in answered.items()}.get("inference-header-content-length")
        result = client.parse_response_body(content, header_length=told)
        assert result.as_numpy("OUT").tolist() == pair.tolist()
        assert result.get_response()["id"] == "r"
