"""Is the server there, and what is it?"""

from conformance.stock import StockClient, exercise


@exercise("is_server_live")
def live(client: StockClient) -> None:
    assert client.is_server_live() is True


@exercise("is_server_ready")
def ready(client: StockClient) -> None:
    assert client.is_server_ready() is True


@exercise("is_model_ready")
def model_ready(client: StockClient) -> None:
    assert client.is_model_ready("echo") is True
    assert client.is_model_ready("versions", "3") is True
    assert client.is_model_ready("versions", "2") is False
    assert client.is_model_ready("arguments") is False
    assert client.is_model_ready("nobody") is False


@exercise("get_server_metadata")
def server_metadata(client: StockClient) -> None:
    metadata = client.told("get_server_metadata")
    assert metadata["name"] == "triton"
    assert {"model_repository", "binary_tensor_data", "statistics", "logging"} <= set(metadata["extensions"])


@exercise("get_server_metadata", "grpc", "grpc.aio")
def server_metadata_as_a_message(client: StockClient) -> None:
    assert client.get_server_metadata(client_timeout=20).name == "triton"


@exercise("close")
def closed(client: StockClient) -> None:
    with client.another() as other:
        assert other.is_server_live()
        other.close()
        try:
            other.is_server_live()
        except Exception as error:  # each kind has an error of its own for this, and none of them is tritonclient's
            assert "close" in str(error).lower() or type(error).__name__ == "InvalidStateError"
        else:
            # geventhttpclient opens a new connection where the pool was closed.
            assert client.kind == "http"
