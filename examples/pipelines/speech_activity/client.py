"""Streams several calls at once in chunks of 32 ms, and prints when somebody speaks, with NVIDIA's client over gRPC.

pip install 'tritonclient[grpc]'
python examples/pipelines/speech_activity/client.py [recording.wav …]
"""

from __future__ import annotations

import argparse
import queue
import wave
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton

RATE = 16_000
CHUNK = 512
"""Samples: 32 ms."""


def main() -> None:
    """Print the stretches of speech in each recording."""
    parser = argparse.ArgumentParser(description="find speech in recordings")
    parser.add_argument("recording", nargs="*", type=Path, help="WAV: 1 channel, 16 bits, 16 kHz; made up without any")
    parser.add_argument("--url", default="localhost:8001", help="host and port of the server (default: %(default)s)")
    options = parser.parse_args()
    calls = {file.name: recorded(file) for file in options.recording} or {
        "first call": made_up(0, [(0.8, 1.6), (2.4, 3.0)]),
        "second call": made_up(1, [(1.2, 2.8)]),
        "silence": made_up(2, []),
    }
    for name, chances in heard(options.url, calls).items():
        spoken = ", ".join(f"{begin:.1f} to {end:.1f} s" for begin, end in stretches(chances))
        print(f"{name:12} {spoken or 'nobody speaks'}")


def heard(url: str, calls: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Return how likely each chunk of each call is speech. The calls go on at the same time, on one connection."""
    answers: queue.Queue = queue.Queue()
    found: dict[str, list[float]] = {name: [] for name in calls}
    with triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        count = max(len(samples) for samples in calls.values()) // CHUNK
        for number in range(count):
            for call, samples in enumerate(calls.values(), 1):
                chunk = samples[number * CHUNK : (number + 1) * CHUNK]
                if len(chunk) < CHUNK:
                    continue
                client.async_stream_infer(
                    "vad",
                    [tensor("input", chunk[None], "FP32"), tensor("sr", np.array([RATE]), "INT64")],
                    request_id=str(call),
                    sequence_id=call,
                    sequence_start=number == 0,
                    sequence_end=len(samples) < (number + 2) * CHUNK,
                )
        names = list(calls)
        for _ in range(sum(len(samples) // CHUNK for samples in calls.values())):
            result, error = answers.get(timeout=60)
            if error is not None:
                raise error
            found[names[int(result.get_response().id) - 1]].append(result.as_numpy("output").item())
    return found


def tensor(name: str, array: np.ndarray, datatype: str) -> triton.InferInput:
    """Return an array as an input."""
    made = triton.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array)
    return made


def stretches(chances: list[float]) -> list[tuple[float, float]]:
    """Return begin and end, in seconds, of what is likely speech. Pauses and sounds of less than 0.1 s do not count."""
    found: list[tuple[float, float]] = []
    for number, chance in enumerate(chances):
        if chance < 0.5:
            continue
        begin, end = number * CHUNK / RATE, (number + 1) * CHUNK / RATE
        if found and begin - found[-1][1] < 0.1:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return [(begin, end) for begin, end in found if end - begin >= 0.1]


def made_up(seed: int, spoken: list[tuple[float, float]], seconds: float = 4) -> np.ndarray:
    """Return noise, with a voice of a kind in these stretches: a hum with overtones that swells with each syllable."""
    chance = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE)) / RATE
    samples = chance.normal(0, 0.003, time.size)
    voice = sum(np.sin(2 * np.pi * 140 * overtone * time) / overtone for overtone in range(1, 8))
    syllables = 0.6 + 0.4 * np.sin(2 * np.pi * 4 * time)
    for begin, end in spoken:
        inside = (time >= begin) & (time < end)
        samples[inside] += 0.1 * (voice * syllables)[inside]
    return samples.astype(np.float32)


def recorded(file: Path) -> np.ndarray:
    """Return the samples of a WAV file. Raises ``ValueError`` if it is of another kind."""
    with wave.open(str(file)) as sound:
        if (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) != (1, 2, RATE):
            raise ValueError(f"{file} must have one channel of 16 bits at {RATE} Hz")
        return np.frombuffer(sound.readframes(sound.getnframes()), np.int16).astype(np.float32) / 32768


if __name__ == "__main__":
    main()
