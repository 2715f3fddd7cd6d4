"""Loops around speech engines, each in a process and a Python of its own: the engine's own functions and nothing else.

    python speech_loops.py openvino|faster DIRECTORY ROUNDS FILE.wav ...

Prints a line of JSON for each file and round: the text, seconds to the first of it, and seconds in all.
"""

from __future__ import annotations

import json
import os
import sys
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def samples_of(file: str) -> Any:
    """Return the samples of a WAV file of 16 bits."""
    with wave.open(file) as opened:
        return np.frombuffer(opened.readframes(opened.getnframes()), "<i2").astype(np.float32) / 2**15


def openvino(directory: str) -> Callable[[Any], tuple[str, float]]:
    """Return OpenVINO GenAI's own pipeline."""
    import openvino_genai

    threads = {"INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0)), "ENABLE_CPU_PINNING": "NO"}
    pipeline = openvino_genai.WhisperPipeline(directory, "CPU", **threads)
    config = pipeline.get_generation_config()
    config.language = "<|en|>"

    def transcribe(samples: Any) -> tuple[str, float]:
        first: list[float] = []

        def heard(_text: str) -> Any:
            first.append(time.perf_counter())
            return openvino_genai.StreamingStatus.RUNNING

        text = pipeline.generate(samples.tolist(), config, heard).texts[0]
        return text, (first or [time.perf_counter()])[0]

    return transcribe


def faster(directory: str) -> Callable[[Any], tuple[str, float]]:
    """Return faster-whisper's own loop, greedy and in full precision."""
    from faster_whisper import WhisperModel

    threads = len(os.sched_getaffinity(0))
    model = WhisperModel(directory, device="cpu", compute_type="float32", cpu_threads=threads, local_files_only=True)

    def transcribe(samples: Any) -> tuple[str, float]:
        segments, _ = model.transcribe(
            samples,
            language="en",
            beam_size=1,
            temperature=0.0,
            condition_on_previous_text=False,
            suppress_tokens=None,
            without_timestamps=True,
            compression_ratio_threshold=None,
            log_prob_threshold=None,
            no_speech_threshold=None,
        )
        texts, first = [], 0.0
        for segment in segments:
            first = first or time.perf_counter()
            texts.append(segment.text)
        return "".join(texts), first or time.perf_counter()

    return transcribe


def main() -> None:
    """Transcribe each file, so many times."""
    kind, directory, rounds, *files = sys.argv[1:]
    transcribe = {"openvino": openvino, "faster": faster}[kind](directory)
    transcribe(samples_of(files[0]))  # to warm up
    for _ in range(int(rounds)):
        for file in files:
            samples = samples_of(file)
            began = time.perf_counter()
            text, first = transcribe(samples)
            seconds = time.perf_counter() - began
            print(json.dumps({"file": Path(file).name, "text": text, "first": first - began, "seconds": seconds}))


if __name__ == "__main__":
    main()
