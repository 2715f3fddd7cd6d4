"""The example of an iterative model, and the client that comes with it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from serving import serving

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_texts_are_written_side_by_side(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "sources" / "babble", tmp_path / "models" / "babble")
    letters = set((EXAMPLES / "sources" / "babble" / "1" / "corpus.txt").read_text())
    lengths = [30, 300, 100]
    with serving(tmp_path / "models", tmp_path / "log") as server:
        url = f"--url={server.http.removeprefix('http://')}"
        program = [sys.executable, EXAMPLES / "clients" / "stream_text.py", "The s", url]
        clients = [
            subprocess.Popen([*program, f"--length={length}"], stdout=subprocess.PIPE, text=True) for length in lengths
        ]
        texts = [client.communicate(timeout=60)[0] for client in clients]
        (statistics,) = server.json("GET", "/v2/models/babble/stats")["model_stats"]
    assert [len(text) for text in texts] == [len("The s") + length + len("\n") for length in lengths]
    assert all(text.startswith("The s") and set(text) <= letters for text in texts)
    assert statistics["inference_count"] == len(lengths)
    assert max(lengths) <= statistics["execution_count"] <= sum(lengths)
    assert statistics["inference_stats"]["queue"]["ns"] >= 0
