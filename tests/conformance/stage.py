"""The two servers that the exam asks, in the scene it needs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from conformance.ask import Answer, ask
from conformance.compare import without_hashes
from conformance.exchange import Scene, Step
from conformance.servers import Server, start_nerite, start_triton

LOST = ("Socket closed", "Connection refused", "Connection reset", "failed to connect")
"""What a gRPC client says of a connection that is gone."""
RESTARTS = 3
"""How often Triton may end by itself, or hang, in one scene."""


class Stage:
    """Holds the two servers of one scene, and changes them when another scene is asked for.

    Triton may end by itself, seldom: at its start on a busy machine, or of some unloads. It may also leave a request
    without an answer. Then it is started again and asked what it was asked before, to come to the same state, and the
    question is put once more. Nerite has to live, and to answer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scene: Scene | None = None
        self.triton: Server | None = None
        self.nerite: Server | None = None
        self.asked: list[Sequence[Step]] = []
        self.restarts = 0
        self.running = ExitStack()

    def set(self, scene: Scene) -> None:
        """Have both servers run in this scene. Raises ``RuntimeError`` where one does not start."""
        if scene != self.scene:
            self.clear()
            self.scene = scene
            triton = start_triton(scene, self.folder / scene.name / "triton")
            self.running.callback(triton.stop)
            nerite = start_nerite(scene, self.folder / scene.name / "nerite")
            self.running.callback(nerite.stop)
            nerite.wait()
            self.nerite = nerite
            try:
                triton.wait()
                self.triton = triton
            except RuntimeError:
                if not ended(triton, 0.0):
                    raise
                self.restart(triton)
        if self.triton is None:
            raise RuntimeError(f"the servers of the scene {scene.name} did not start, as said above")

    def ask_nerite(self, steps: Sequence[Step]) -> list[Answer]:
        assert self.nerite is not None
        return [without_hashes(answer) for answer in ask(self.nerite, steps)]

    def ask_triton(self, steps: Sequence[Step]) -> list[Answer]:
        """Ask, again where Triton ended or hung. Raises ``RuntimeError`` where it does so again and again."""
        while True:
            assert self.triton is not None
            try:
                answers = ask(self.triton, steps)
            except (OSError, ValueError):  # no connection, or half an answer
                if not ended(self.triton, 5.0):
                    raise
            else:
                if not ended(self.triton, 1.0 if any(map(lost, answers)) else 0.0):
                    if not any(answer.get("broken") == TimeoutError.__name__ for answer in answers):
                        self.asked.append(steps)
                        return answers
                    self.triton.stop()
            self.restart(self.triton)

    def restart(self, dead: Server) -> None:
        """Start Triton once more and bring it to where it was."""
        assert self.scene is not None
        self.restarts += 1
        last_words = f"Triton ended with {dead.process.returncode}:\n{dead.log.read_text()[-4000:]}"
        print(last_words)
        if self.restarts > RESTARTS:
            raise RuntimeError(last_words)
        triton = start_triton(self.scene, self.folder / self.scene.name / f"triton-{self.restarts}")
        self.running.callback(triton.stop)
        triton.wait()
        self.triton = triton
        for steps in self.asked:
            ask(triton, steps)

    def clear(self) -> None:
        """Stop the servers that run."""
        self.triton = self.nerite = None
        self.asked.clear()
        self.restarts = 0
        self.running.close()


def ended(server: Server, within: float) -> bool:
    """Whether the process is gone, or goes within so many seconds: its connections are closed before that."""
    try:
        server.process.wait(within)
    except subprocess.TimeoutExpired:
        return False
    return True


def lost(answer: Answer) -> bool:
    """Whether the connection was closed instead of an answer, as it is where the server ends."""
    details = str(answer.get("details", ""))
    return "broken" in answer or any(words in details for words in LOST)
