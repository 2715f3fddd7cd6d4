"""gRPC streams, and models that answer by a response sender: what comes, in which order, and how it ends."""

from conformance.exchange import Stream, grpc_infer, grpc_tensor, infer, infer_message, tensor
from conformance.exchanges.scenes import STREAMS

SCENE = STREAMS
EMPTY_FINAL = {"triton_enable_empty_final_response": True}
STRICT = (("triton_grpc_error", "true"),)


def asked(model, words, **more):
    contents = {"bytes_contents": [words.encode()]}
    return infer_message(model, grpc_tensor("KIND", "BYTES", [1], contents), **more)


def many(words, **more):
    return asked("many", words, **more)


def one(words, **more):
    return asked("one", words, **more)


WRONG = infer_message("one", grpc_tensor("OTHER", "INT32", [1], {"int_contents": [1]}), id="wrong")
NOBODY = infer_message("nobody", grpc_tensor("KIND", "BYTES", [1], {"bytes_contents": [b"x"]}), id="nobody")
BAD_SIZE = infer_message("one", grpc_tensor("KIND", "BYTES", [1]), id="size")

EXCHANGES = {
    "nothing asked": Stream(()),
    "one": Stream((one("return"),)),
    "one, with an id": Stream((one("return", id="me"),)),
    "one, and an empty last one is wanted": Stream((one("return", id="me", parameters=EMPTY_FINAL),)),
    "several of one model, in order": Stream(tuple(one("return", id=str(number)) for number in range(5))),
    "a slow one and a wrong one": Stream((one("sleep return", id="slow"), WRONG, one("return", id="last"))),
    "a slow one and an unknown model": Stream((one("sleep return", id="slow"), NOBODY, one("return", id="last"))),
    "an input without data": Stream((BAD_SIZE, one("return", id="last"))),
    "an error of the model": Stream((one("error", id="bad"), one("return", id="good"))),
    "a model that raises": Stream((one("raise", id="bad"), one("return", id="good"))),
    "many": Stream((many("send send last", id="me"),)),
    "many, and an end that says nothing": Stream((many("send send end", id="me"),)),
    "an end that is wanted": Stream((many("send end", id="me", parameters=EMPTY_FINAL),)),
    "an end that is wanted, behind a last response": Stream((many("send last", parameters=EMPTY_FINAL),)),
    "none at all": Stream((many("end", id="me"),)),
    "none at all, and the end is wanted": Stream((many("end", id="me", parameters=EMPTY_FINAL),)),
    "an error among many": Stream((many("send error send end", id="me"),)),
    "a last error": Stream((many("send not-found", id="me"),)),
    "None without a flag": Stream((many("none end"),)),
    "a flag that is not offered": Stream((many("flags end"),)),
    "an output that is not declared": Stream((many("other end"),)),
    "sent after the end": Stream((many("send after-end"), many("last"))),
    "raised before the end": Stream((many("send raise", id="me"), many("last"))),
    "raised after the end": Stream((many("send end raise"), many("last"))),
    "a decoupled model that returns responses": Stream((many("send end return"), many("last"))),
    "a decoupled model that returns none of them": Stream((many("send end return-empty"), many("last"))),
    "cancelled or not": Stream((many("cancelled end"),)),
    "errors end the stream: of the model": Stream((one("error", id="bad"),), STRICT),
    "errors end the stream: of a decoupled model": Stream((many("send not-found", id="me"),), STRICT),
    "errors end the stream: unknown model": Stream((NOBODY,), STRICT),
    "errors end the stream: wrong input": Stream((WRONG,), STRICT),
    "errors end the stream: nothing wrong": Stream((one("return", id="good"), many("send end")), STRICT, gap=0.3),
    "many and one": Stream((many("send send end", id="many"), one("return", id="one")), gap=0.3),
    "sender of a model that is not decoupled": Stream((one("last", id="me"),)),
    "sender, and then the end": Stream((one("send end", id="me"),)),
    "sender, an end and no response": Stream((one("end", id="me"), one("return", id="good")), gap=0.3),
    "sender, and nothing is returned": Stream((one("last nothing", id="me"), one("return", id="good")), gap=0.3),
    "sender, two responses": Stream((one("send last", id="me"), one("return", id="good")), gap=0.3),
    "unary: sender": grpc_infer("one", grpc_tensor("KIND", "BYTES", [1], {"bytes_contents": [b"last"]})),
    "unary: sender, and then the end": grpc_infer(
        "one", grpc_tensor("KIND", "BYTES", [1], {"bytes_contents": [b"send end"]})
    ),
    "HTTP: sender": infer("one", tensor("KIND", "BYTES", [1], ["last"])),
    "unary: sender, an end and no response": grpc_infer(
        "one", grpc_tensor("KIND", "BYTES", [1], {"bytes_contents": [b"end"]})
    ),
    "HTTP: sender, an end and no response": infer("one", tensor("KIND", "BYTES", [1], ["end"])),
    "HTTP: sender, and nothing is returned": infer("one", tensor("KIND", "BYTES", [1], ["last nothing"])),
    "HTTP: decoupled": infer("many", tensor("KIND", "BYTES", [1], ["last"])),
    "unary: decoupled": grpc_infer("many", grpc_tensor("KIND", "BYTES", [1], {"bytes_contents": [b"last"]})),
}
