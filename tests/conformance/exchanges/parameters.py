"""Parameters of requests, forwarded headers, and what a model sees of them."""

from typing import Any

from conformance.exchange import Http, get, grpc_infer, grpc_tensor, infer, tensor, wanted
from conformance.exchanges.scenes import GOOD

SCENE = GOOD


def asked(headers: dict[str, str] | None = None, **top: Any) -> Http:
    return infer("request", tensor("IN", "INT32", [1], [1]), headers=headers, **top)


def with_parameters(**parameters: Any) -> Http:
    return asked(parameters=parameters)


def sent_with(header: str, value: str) -> Http:
    return Http("POST", "/v2/models/request/infer", asked().body, ((header, value),))


def called(metadata: Any = (), **top: Any) -> Any:
    return grpc_infer("request", grpc_tensor("IN", "INT32", [1], {"int_contents": [1]}), metadata=metadata, **top)


def called_with(**parameters: Any) -> Any:
    return called(parameters=parameters)


RESERVED = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")

EXCHANGES = {
    # ---- HTTP ----
    "none": asked(),
    "id": asked(id="abc"),
    "custom ones of all types": with_parameters(text="a", number=-5, yes=True, half=0.5, large=9223372036854775807),
    "number beyond 63 bits": with_parameters(large=9223372036854775808),
    "number beyond 64 bits": with_parameters(large=18446744073709551616),
    "empty name": with_parameters(**{"": "x"}),
    "null": with_parameters(nothing=None),
    "array": with_parameters(many=[1]),
    "object": with_parameters(deep={"a": 1}),
    "reserved": with_parameters(triton_something="x"),
    "reserved, in capitals": with_parameters(TRITON_something="x"),
    "the reserved one that gRPC allows": with_parameters(triton_enable_empty_final_response=True),
    "sequence number": with_parameters(sequence_id=7, sequence_start=True, sequence_end=True),
    "sequence text": with_parameters(sequence_id="seven"),
    "sequence text empty": with_parameters(sequence_id=""),
    "sequence zero": with_parameters(sequence_id=0, sequence_start=True),
    "sequence text too long": with_parameters(sequence_id="x" * 129),
    "sequence text just short enough": with_parameters(sequence_id="x" * 128),
    "sequence negative": with_parameters(sequence_id=-1),
    "sequence with a fraction": with_parameters(sequence_id=1.5),
    **{
        f"sequence that is {name}": with_parameters(sequence_id=value)
        for name, value in {"true": True, "null": None, "a list": [1], "an object": {}, "an exponent": 1e300}.items()
    },
    "sequence of 64 bits": with_parameters(sequence_id=18446744073709551615),
    "sequence beyond 64 bits": with_parameters(sequence_id=2**64),
    "sequence text beyond ASCII": with_parameters(sequence_id="\u00e9" * 128),
    "priority of 64 bits": with_parameters(priority=2**64 - 1),
    "timeout of 64 bits": with_parameters(timeout=2**64 - 1),
    "sequence_start as number": with_parameters(sequence_start=1),
    "sequence_end as text": with_parameters(sequence_end="true"),
    "only sequence_end": with_parameters(sequence_end=True),
    "priority": with_parameters(priority=3),
    "priority as text": with_parameters(priority="3"),
    "priority negative": with_parameters(priority=-3),
    "priority with a fraction": with_parameters(priority=1.5),
    "timeout": with_parameters(timeout=5000000),
    "timeout as text": with_parameters(timeout="5"),
    "timeout negative": with_parameters(timeout=-5),
    "timeout of zero": with_parameters(timeout=0),
    "timeout true": with_parameters(timeout=True),
    "unknown parameter of an input": infer("request", tensor("IN", "INT32", [1], [1], colour="red")),
    "unknown parameter of an output": infer(
        "request", tensor("IN", "INT32", [1], [1]), outputs=[wanted("REQUEST", colour="red")]
    ),
    "requested outputs": infer(
        "request", tensor("IN", "INT32", [1], [1]), outputs=[wanted("REQUEST", binary_data=False)]
    ),
    "shared memory of no such region": infer(
        "request", tensor("IN", "INT32", [1], shared_memory_region="r", shared_memory_byte_size=4)
    ),
    "shared memory without a size": infer("request", tensor("IN", "INT32", [1], shared_memory_region="r")),
    "output to shared memory of no such region": infer(
        "request",
        tensor("IN", "INT32", [1], [1]),
        outputs=[wanted("REQUEST", shared_memory_region="r", shared_memory_byte_size=4)],
    ),
    "output both binary and in shared memory": infer(
        "request",
        tensor("IN", "INT32", [1], [1]),
        outputs=[wanted("REQUEST", shared_memory_region="r", shared_memory_byte_size=4, binary_data=True)],
    ),
    "output both classified and in shared memory": infer(
        "request",
        tensor("IN", "INT32", [1], [1]),
        outputs=[wanted("REQUEST", shared_memory_region="r", shared_memory_byte_size=4, classification=1)],
    ),
    "forwarded header": asked({"X-Forward-User": "ann"}),
    "forwarded header in small letters": asked({"x-forward-user": "ann"}),
    "pattern inside of a header name": asked({"My-X-Forward": "ann"}),
    "header that is not forwarded": asked({"X-Other": "ann"}),
    "header and parameter of one name": asked({"x-forward-a": "header"}, parameters={"x-forward-a": "parameter"}),
    "reserved header": sent_with("triton_thing", "x"),
    **{f"reserved header: {name}": sent_with(name, "1") for name in RESERVED},
    "reserved header in capitals": sent_with("PRIORITY", "1"),
    "reserved prefix of a header in capitals": sent_with("TRITON_thing", "x"),
    "empty header": asked({"X-Forward-User": ""}),
    "header given twice": Http(
        "POST", "/v2/models/request/infer", asked().body, (("x-forward-a", "1"), ("x-forward-a", "2"))
    ),
    "header forwarded nowhere": get("/v2/models/request", x_forward_a="1"),
    # ---- gRPC ----
    "gRPC: none": called(),
    "gRPC: id": called(id="abc"),
    "gRPC: custom ones of all types": called_with(
        text="a", number=-5, yes=True, half=0.5, large=("uint64", 18446744073709551615)
    ),
    "gRPC: parameter without a value": called_with(nothing=("string", "")),
    "gRPC: reserved": called_with(triton_something="x"),
    "gRPC: the reserved one that is allowed": called_with(triton_enable_empty_final_response=True),
    "gRPC: the reserved one that is allowed, as number": called_with(triton_enable_empty_final_response=1),
    "gRPC: sequence number": called_with(sequence_id=7, sequence_start=True, sequence_end=True),
    "gRPC: sequence text": called_with(sequence_id="seven"),
    "gRPC: sequence text too long": called_with(sequence_id="x" * 129),
    "gRPC: sequence text just short enough": called_with(sequence_id="x" * 128),
    "gRPC: sequence text beyond ASCII": called_with(sequence_id="\u00e9" * 128),
    "gRPC: sequence text empty": called_with(sequence_id=""),
    "gRPC: sequence zero": called_with(sequence_id=0, sequence_start=True),
    "gRPC: only sequence_end": called_with(sequence_end=True),
    "gRPC: sequence of 63 bits": called_with(sequence_id=2**63 - 1),
    "gRPC: sequence negative": called_with(sequence_id=-1),
    "gRPC: sequence as uint64": called_with(sequence_id=("uint64", 7)),
    "gRPC: sequence as bool": called_with(sequence_id=True),
    "gRPC: sequence_start as number": called_with(sequence_start=1),
    "gRPC: sequence_end as text": called_with(sequence_end="true"),
    "gRPC: priority": called_with(priority=3),
    "gRPC: priority as uint64": called_with(priority=("uint64", 3)),
    "gRPC: priority of 64 bits": called_with(priority=("uint64", 2**64 - 1)),
    "gRPC: timeout of 63 bits": called_with(timeout=2**63 - 1),
    "gRPC: priority negative": called_with(priority=-3),
    "gRPC: priority as text": called_with(priority="3"),
    "gRPC: timeout": called_with(timeout=5000000),
    "gRPC: timeout as uint64": called_with(timeout=("uint64", 5000000)),
    "gRPC: timeout as text": called_with(timeout="5"),
    "gRPC: timeout negative": called_with(timeout=-5),
    "gRPC: binary_data_output": called_with(binary_data_output=True),
    "gRPC: forwarded metadata": called((("x-forward-user", "ann"),)),
    "gRPC: metadata that is not forwarded": called((("x-other", "ann"),)),
    "gRPC: reserved metadata": called((("triton_thing", "x"),)),
    **{f"gRPC: reserved metadata: {name}": called(((name, "1"),)) for name in RESERVED},
    "gRPC: metadata given twice": called((("x-forward-a", "1"), ("x-forward-a", "2"))),
    "gRPC: metadata and parameter of one name": called((("x-forward-a", "metadata"),), parameters={"x-forward-a": "p"}),
}
