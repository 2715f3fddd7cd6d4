"""What models are like: metadata, configuration, statistics."""

import numpy as np

from conformance.stock import GRPC, HTTP, StockClient, exercise

UNKNOWN = "Request for unknown model: 'nobody' is not found"


def sizes(shape: list[object]) -> list[int]:
    """Return a shape whose 64-bit numbers are texts, as protobuf's JSON has them, in numbers."""
    return [int(str(size)) for size in shape]


@exercise("get_model_metadata")
def model_metadata(client: StockClient) -> None:
    metadata = client.told("get_model_metadata", "echo")
    (given,) = metadata["inputs"]
    assert (metadata["name"], metadata["versions"], metadata["platform"]) == ("echo", ["1"], "python")
    assert (given["name"], given["datatype"], sizes(given["shape"])) == ("IN", "INT32", [-1, 2])
    assert [output["name"] for output in metadata["outputs"]] == ["OUT"]


@exercise("get_model_metadata")
def metadata_of_a_version(client: StockClient) -> None:
    assert client.told("get_model_metadata", "versions", "3")["versions"] == ["3"]
    assert len(client.told("get_model_metadata", "versions")["versions"]) > 1
    status, text = client.refused("get_model_metadata", "nobody")
    assert status == ("NOT_FOUND" if client.is_grpc else "404")
    assert UNKNOWN in text


@exercise("get_model_metadata", *GRPC)
def metadata_as_a_message(client: StockClient) -> None:
    metadata = client.get_model_metadata("echo", "1", client_timeout=20)
    assert list(metadata.inputs[0].shape) == [-1, 2]


@exercise("get_model_config")
def configuration(client: StockClient) -> None:
    told = client.told("get_model_config", "echo", "1")
    config = told["config"] if client.is_grpc else told
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("echo", "python", 8)
    assert config["input"][0]["data_type"] == "TYPE_INT32"
    assert sizes(config["input"][0]["dims"]) == [2]


@exercise("get_model_config")
def configuration_of_nobody(client: StockClient) -> None:
    status, text = client.refused("get_model_config", "nobody")
    assert status == ("NOT_FOUND" if client.is_grpc else "404")
    assert UNKNOWN in text


@exercise("get_model_config", *GRPC)
def configuration_as_a_message(client: StockClient) -> None:
    config = client.get_model_config("versions").config
    assert config.max_batch_size == 2
    assert config.version_policy.WhichOneof("policy_choice") == "all"


@exercise("get_inference_statistics")
def statistics(client: StockClient) -> None:
    def count() -> int:
        (entry,) = client.told("get_inference_statistics", "echo", "1")["model_stats"]
        assert (entry["name"], entry["version"]) == ("echo", "1")
        return int(entry["inference_stats"]["success"].get("count", 0))

    before = count()
    client.infer("echo", [client.tensor("IN", np.ones((1, 2), np.int32))])
    assert count() == before + 1


@exercise("get_inference_statistics")
def statistics_of_all(client: StockClient) -> None:
    entries = client.told("get_inference_statistics")["model_stats"]
    assert {"echo", "versions", "types"} <= {entry["name"] for entry in entries}
    assert len([entry for entry in entries if entry["name"] == "versions"]) > 1
    assert "'nobody'" in client.refused("get_inference_statistics", "nobody")[1]


@exercise("get_inference_statistics", *GRPC)
def statistics_as_a_message(client: StockClient) -> None:
    assert client.get_inference_statistics("echo").model_stats[0].name == "echo"


@exercise("get_model_repository_index")
def repository_index(client: StockClient) -> None:
    told = client.told("get_model_repository_index")
    entries = told["models"] if client.is_grpc else told
    (echo,) = [entry for entry in entries if entry["name"] == "echo"]
    assert (echo["version"], echo["state"]) == ("1", "READY")
    assert "arguments" in {entry["name"] for entry in entries}


@exercise("get_model_repository_index", *GRPC)
def repository_index_as_a_message(client: StockClient) -> None:
    assert ("echo", "1", "READY") in {
        (entry.name, entry.version, entry.state) for entry in client.get_model_repository_index().models
    }


@exercise("get_model_metadata", *HTTP)
def without_anything_besides(client: StockClient) -> None:
    assert client.get_model_metadata("echo", headers=None, query_params=None)["name"] == "echo"
