"""Workers that die in the middle of a call: who waited for them is told, and nothing stays behind."""

from __future__ import annotations

import threading
from pathlib import Path

from laboratory import laboratory, said, waiting_for
from serving import eventually, python_model, serving

MORTAL = """
def execute(self, requests):
    print("begun", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_called_model_dies(tmp_path: Path) -> None:
    models = laboratory(tmp_path / "models")
    python_model(models, "mortal", MORTAL)
    with serving(models, tmp_path / "log") as server:
        first, last = said(server, "tell(ask('mortal').exec())\ntell(ask().exec())")
        assert first.startswith("INTERNAL Stub process 'mortal_0_0' is not healthy. The worker died while it ran this")
        assert last == "[[1.0, 2.0]]"
        eventually(lambda: server.ready("mortal"))


def test_the_caller_dies(tmp_path: Path) -> None:
    models = laboratory(tmp_path / "models")
    go = tmp_path / "go"
    program = f"""
import threading
value = np.zeros(100_000, np.float32)
threading.Thread(target=lambda: ask("patient", value).exec(), daemon=True).start()
responses = ask("counter", [100000.0]).exec(decoupled=True)
next(responses)
{waiting_for(go)}
os.kill(os.getpid(), signal.SIGKILL)
"""
    with serving(models, tmp_path / "log", "--model-control-mode=explicit", "--load-model=*") as server:
        errors: list[str] = []

        def ask() -> None:
            try:
                said(server, program)
            except RuntimeError as error:
                errors.append(str(error))

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: "waiting" in server.text and "sent 8" in server.text)
        assert said(server, "tell(ask().exec())", "alab") == ["[[1.0, 2.0]]"]
        go.touch()
        asking.join()
        assert "Stub process 'lab_0_0' is not healthy" in errors[0]
        eventually(lambda: server.text.count("cancelled") == 2)
        eventually(lambda: server.ready("lab"))
        assert said(server, "tell(ask().exec())") == ["[[1.0, 2.0]]"]
        # A call that was left behind would keep its model from ending.
        for model in ("patient", "counter", "echo"):
            server.ask("POST", f"/v2/repository/models/{model}/unload")
            eventually(lambda model=model: server.state(model) == "UNAVAILABLE")  # type: ignore[misc]  # bound now
