"""Infer requests whose body is a file, or a form of files and values, instead of Triton's JSON.

Slow conversions to tensors run in a thread, and large JSON is parsed by a helper process.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.failures import report
from nerite.core.request import InferenceRequest
from nerite.core.signature import Signature, SignatureInput
from nerite.core.tensor import Buffer, TensorSpec
from nerite.transports.http import files, large_json, reply
from nerite.transports.http.files import FormPart
from nerite.transports.http.handler import HttpExchange
from nerite.transports.http.infer_request import HttpInferReader
from nerite.transports.http.json_text import LARGE

if TYPE_CHECKING:
    from nerite.inference_entry import TransportEntry

_Tensors: TypeAlias = Sequence[tuple[TensorSpec, Buffer]]


def is_upload(content_type: str) -> bool:
    """Return whether a body of this content type is a file or a form."""
    media_type = files.form_media_type(content_type)
    return media_type == files.TYPE or files.is_file(media_type)


class Uploads:
    """Turns files and forms into inferences."""

    def __init__(self, server: TransportEntry, max_size: int, half: bool) -> None:
        """``max_size`` limits the bytes of a tensor made from a file. ``half``: FP16 and BF16 are allowed in JSON."""
        self._server = server
        self._max_size = max_size
        self._half = half
        self._pool = ThreadPoolExecutor(os.cpu_count(), "uploads")

    def infer(self, connection: HttpExchange, reader: HttpInferReader, content_type: str, body: memoryview) -> None:
        """Answer a request. Raises ``NeriteError`` for errors that are found before any background work."""
        arrived_ns = time.monotonic_ns()
        signature = self._server.find(reader.model_name, reader.model_version).signature
        given = _parts(signature, content_type, body)
        batched = signature.max_batch_size > 0
        read = partial(self._read, batched, given)
        if sum(len(part.data) for declared, part in given if files.is_json(declared, part)) > LARGE:
            self._read_in_helper(connection, reader, arrived_ns, given, batched)
        elif any(files.takes_long(declared, part) for declared, part in given):
            made = asyncio.get_running_loop().run_in_executor(self._pool, read)
            made.add_done_callback(partial(self._tensors_made, connection, reader, arrived_ns))
        else:
            self._submit(connection, reader, arrived_ns, read())

    def _read(self, batched: bool, given: Sequence[tuple[SignatureInput, FormPart]]) -> _Tensors:
        return [files.read_file(declared, batched, part, self._max_size, self._half) for declared, part in given]

    def _read_in_helper(
        self,
        connection: HttpExchange,
        reader: HttpInferReader,
        arrived_ns: int,
        given: Sequence[tuple[SignatureInput, FormPart]],
        batched: bool,
    ) -> None:
        """Have a helper process convert the parts, because they contain large JSON."""

        def done(values: list[Any]) -> None:
            self._submit(connection, reader, arrived_ns, large_json.tensors_of(values))

        def refuse(error: NeriteError) -> None:
            connection.send([reply.error_reply(error).encode()])

        inputs = large_json.tensors_json(declared for declared, _ in given)
        types = [part.media_type for _, part in given]
        arguments = [inputs, types, batched, self._max_size, self._half, *(part.data for _, part in given)]
        large_json.InferReading(self._server.helpers, connection, large_json.read_parts, arguments, done, refuse)

    def _tensors_made(
        self, connection: HttpExchange, reader: HttpInferReader, arrived_ns: int, made: asyncio.Future[_Tensors]
    ) -> None:
        try:
            tensors = made.result()
            if not connection.gone:
                self._submit(connection, reader, arrived_ns, tensors)
        except NeriteError as error:
            connection.send([reply.error_reply(error).encode()])
        except Exception as error:
            failure = report("http", error, f"in a file for '{reader.model_name}'")
            connection.send([reply.error_reply(failure).encode()])

    def _submit(self, connection: HttpExchange, reader: HttpInferReader, arrived_ns: int, tensors: _Tensors) -> None:
        header = reader.header([spec for spec, _ in tensors])
        request = InferenceRequest(header, [data for _, data in tensors], connection, arrived_ns)
        connection.request = request
        self._server.infer(request)


def _parts(signature: Signature, content_type: str, body: memoryview) -> list[tuple[SignatureInput, FormPart]]:
    """Return the parts of the body, each with the input that it is for."""
    media_type = files.form_media_type(content_type)
    inputs = signature.inputs
    names = ", ".join(f"'{name}'" for name in inputs) or "none"
    if media_type == files.TYPE:
        parts = files.parse_multipart(content_type, body)
        for part in parts:
            if part.name not in inputs:
                raise InvalidArgument(
                    f"unexpected inference input '{part.name}' for model '{signature.model_name}'. Each part of a form "
                    f"must have the name of an input; the inputs are: {names}"
                )
        return [(inputs[part.name], part) for part in parts]
    needed = [declared for declared in inputs.values() if len(inputs) == 1 or not declared.optional]
    if len(needed) != 1:
        raise InvalidArgument(
            "a file as the request body needs a model with one input, or with one required input; the inputs of model "
            f"'{signature.model_name}' are: {names}. Send a form with a part for each (curl -F 'NAME=@file'), or JSON "
            'with {"b64": "…"} in place of a string'
        )
    return [(declared, FormPart(declared.name, media_type, body)) for declared in needed]
