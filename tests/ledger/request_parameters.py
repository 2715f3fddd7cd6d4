"""What a request may say beside its tensors, over HTTP and gRPC."""

from __future__ import annotations

from typing import Final

REQUEST_PARAMETERS: Final = {
    "id": "parameters: id",
    "sequence_id": "parameters: sequence number",
    "sequence_start": "sequences: direct: from START to END",
    "sequence_end": "sequences: direct: from START to END",
    "priority": "service/test_schedulers.py::test_the_urgent_first",
    "timeout": "queue: waits too long by its own word",
    "binary_data_output": "infer_binary: binary in and out",
    "triton_enable_empty_final_response": "streams: none at all, and the end is wanted",
    "headers": "parameters: forwarded header",
    "(any other)": "parameters: custom ones of all types",
    "inputs: binary_data_size": "infer_binary: binary in, JSON out",
    "inputs: shared_memory_region": "shared_memory: an input",
    "inputs: shared_memory_offset": "shared_memory: an input with an offset",
    "inputs: shared_memory_byte_size": "shared_memory: an input of another size",
    "inputs: (any other)": "parameters: unknown parameter of an input",
    "outputs: binary_data": "infer_binary: JSON in, binary out",
    "outputs: classification": "classification: best two",
    "outputs: shared_memory_region": "shared_memory: an output",
    "outputs: shared_memory_offset": "service/test_shared_memory.py::test_both_ways",
    "outputs: shared_memory_byte_size": "shared_memory: an output with room to spare",
    "outputs: (any other)": "parameters: unknown parameter of an output",
    "load: config": "repository_explicit: load with a configuration",
    "load: file:<path>": "repository_explicit: load with files",
    "unload: unload_dependents": "ensembles_explicit: unload keeps what another needs",
    "index: ready": "repository_explicit: ready ones at the start",
    "header Inference-Header-Content-Length": "infer_binary: binary in and out",
    "header Content-Encoding": "compression: gzip in",
    "header Accept-Encoding": "compression: gzip out",
    "metadata grpc-timeout": "service/test_cancel.py::test_the_server_keeps_a_deadline_itself",
    "metadata grpc-encoding": "compression: gRPC: compressed message",
    "metadata triton_grpc_error": "streams: errors end the stream: of the model",
}
