"""Shows what batching, priorities and deadlines do, with NVIDIA's client over gRPC.

pip install 'tritonclient[grpc]' scikit-learn
python examples/pipelines/batching/client.py
"""

from __future__ import annotations

import argparse
import queue
import time
from collections import Counter

import numpy as np
import tritonclient.grpc as triton
from digits import unseen

MODEL = "neighbours"


def main() -> None:
    """Send requests one by one, then many at once, then urgent and impatient ones among many."""
    parser = argparse.ArgumentParser(description="watch a dynamic batcher at work")
    parser.add_argument("--url", default="localhost:8001", help="host and port of the server (default: %(default)s)")
    client = triton.InferenceServerClient(parser.parse_args().url)
    pixels, digits = unseen()

    def together(kinds: list[dict[str, int]]) -> list[tuple[int, int | None]]:
        """Send a request for each element of ``kinds`` at once; return number and answer, as they come back."""
        answers: queue.SimpleQueue = queue.SimpleQueue()
        for number, kind in enumerate(kinds):

            def arrived(result: triton.InferResult | None, error: Exception | None, number: int = number) -> None:
                answers.put((number, result, error))

            client.async_infer(MODEL, [as_input(pixels[number])], arrived, **kind)
        received = [answers.get() for _ in kinds]
        return [(number, None if error else answer.as_numpy("digit").item()) for number, answer, error in received]

    before = batches(client)
    began = time.perf_counter()
    for row in pixels[:100]:
        client.infer(MODEL, [as_input(row)])
    print(f"100 requests, one after the other: {time.perf_counter() - began:.2f} s, {sizes(before, batches(client))}")

    before = batches(client)
    began = time.perf_counter()
    answers = together([{}] * 400)
    print(f"400 requests, all at once:         {time.perf_counter() - began:.2f} s, {sizes(before, batches(client))}")
    right = np.mean([answer == digits[number] for number, answer in answers])
    print(f"    {right:.0%} of the digits are read right")

    answers = together([{"priority": 2}] * 400 + [{"priority": 1}] * 20)
    places = [place for place, (number, _) in enumerate(answers, start=1) if number >= 400]
    print(f"20 urgent requests, sent after 400 others, were answered as number {min(places)} to {max(places)}")

    # A timeout of a request is in microseconds.
    answers = together([{}] * 400 + [{"timeout": 20_000}] * 50)
    late = sum(answer is None for _, answer in answers)
    print(f"50 requests with 20 ms of patience behind 400 others: {late} were told in time that it will not do")


def as_input(row: np.ndarray) -> triton.InferInput:
    """Return a batch of one digit."""
    tensor = triton.InferInput("pixels", [1, 64], "FP32")
    tensor.set_data_from_numpy(row[None])
    return tensor


def batches(client: triton.InferenceServerClient) -> Counter[int]:
    """Return how many batches of each size the model has run so far."""
    (model,) = client.get_inference_statistics(MODEL).model_stats
    return Counter({entry.batch_size: entry.compute_infer.count for entry in model.batch_stats})


def sizes(before: Counter[int], after: Counter[int]) -> str:
    """Say how large the batches between two counts were."""
    return "batches of " + ", ".join(f"{size} ({count} times)" for size, count in sorted((after - before).items()))


if __name__ == "__main__":
    main()
