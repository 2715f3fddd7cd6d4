"""Sleeps, and tells whose turn it was: the number of this execution, whether another ran, and how many cores it has."""

import os
import time
from pathlib import Path

import numpy as np

import triton_python_backend_utils as pb_utils

FOLDER = Path(__file__).parents[3]
TURNS, RUNNING = FOLDER / "turns", FOLDER / "running"


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        with TURNS.open("a") as turns:
            turns.write(".")
        number = TURNS.stat().st_size
        others = RUNNING.exists()
        RUNNING.touch()
        time.sleep(int(request.inputs()[0].as_numpy()[0]) / 1000)
        RUNNING.unlink(missing_ok=True)
        told = np.array([number, others, len(os.sched_getaffinity(0))], np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("TURN", told)])
