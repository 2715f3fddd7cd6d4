"""Asks Nerite's documentation, with NVIDIA's client over gRPC.

pip install 'tritonclient[grpc]'
python examples/pipelines/rag/client.py ["a question of your own" …] [--stream]
"""

from __future__ import annotations

import argparse
import queue
import textwrap

import numpy as np
import tritonclient.grpc as triton

QUESTIONS = [
    "Which origins may a browser come from?",
    "Which port does SageMaker use?",
    "Can a model have its own Python environment?",
]


def main() -> None:
    """Print each question with its answer."""
    parser = argparse.ArgumentParser(description="ask the documentation")
    parser.add_argument("question", nargs="*", default=QUESTIONS)
    parser.add_argument("--stream", action="store_true", help="print each sentence as it comes")
    parser.add_argument("--url", default="localhost:8001", help="host and port of the server (default: %(default)s)")
    options = parser.parse_args()
    client = triton.InferenceServerClient(options.url)
    for question in options.question:
        print(question)
        tensor = triton.InferInput("question", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([question.encode()], dtype=object))
        for answer in stream(client, tensor) if options.stream else [client.infer("rag", [tensor])]:
            text = answer.as_numpy("answer")[0].decode()
            print(textwrap.indent(textwrap.fill(text, 100, break_on_hyphens=False), "    "))


def stream(client: triton.InferenceServerClient, tensor: triton.InferInput):
    """Give the responses of ``rag_stream``, each as soon as it is there."""
    responses: queue.SimpleQueue = queue.SimpleQueue()
    client.start_stream(lambda result, error: responses.put((result, error)))
    client.async_stream_infer("rag_stream", [tensor], enable_empty_final_response=True)
    while True:
        result, error = responses.get()
        if error:
            raise error
        response = result.get_response()
        # The last response of all may be a response like the others, or nothing but the news that it is the last.
        if response.outputs:
            yield result
        if response.parameters["triton_final_response"].bool_param:
            break
    client.stop_stream()


if __name__ == "__main__":
    main()
