"""What a model needs is made while the ports are open: the server is live, not ready, and says how far it is."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import wheels
from serving import Serving, eventually, pbtxt, python_model, serving

ENVIRONMENT = (
    'parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "$$TRITON_MODEL_DIRECTORY/requirements.txt" } }'
)
MODEL = """
def execute(self, requests):
    import held
    inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT0") for request in requests]
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", x.as_numpy() + held.ADDED)]) for x in inputs]
"""


class Preparing(Serving):
    """A server that makes something for a model."""

    started = "The ports are open before the models are ready"


class HeldIndex:
    """A package index that answers when it is told to, with what it has: nothing, or a wheel."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.has_wheel = True
        self.released = threading.Event()
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.released.wait(60)
                file = index.wheel.name
                if not (index.has_wheel and self.path.rstrip("/").endswith(("/held", file))):
                    self.send_error(404)
                    return
                is_file = self.path.endswith(file)
                body = index.wheel.read_bytes() if is_file else f'<a href="/{file}">{file}</a>'.encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/octet-stream" if is_file else "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *arguments: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[HeldIndex]:
    wheels.wheel_of_installed(tmp_path / "wheels", "numpy")
    made = HeldIndex(wheels.wheel(tmp_path / "offered", "held", "1.0", "ADDED = 1\n"))
    yield made
    made.close()


@contextmanager
def started(
    folder: Path, index: HeldIndex, kind: type[Serving] = Preparing, *, clean: bool = True
) -> Iterator[Serving]:
    """Serve a model with an environment from the index."""
    model = python_model(folder / "models", "adder", MODEL, pbtxt(parameters=ENVIRONMENT))
    (model / "requirements.txt").write_text("held==1.0\n")
    environment = {
        "UV_INDEX_URL": f"http://127.0.0.1:{index.server.server_port}/simple",
        "UV_FIND_LINKS": str(folder / "wheels"),
        "UV_NO_CACHE": "1",
        "NO_PROXY": "127.0.0.1",
    }
    flag = f"--environment-directory={folder / 'kept'}"
    with serving(folder / "models", folder / "log", flag, environment=environment, kind=kind, clean=clean) as server:
        yield server


def reason(server: Serving) -> str:
    (entry,) = server.json("POST", "/v2/repository/index")
    return f"{entry.get('state')}: {entry.get('reason')}"


def test_live_and_not_ready_until_it_is_made(tmp_path: Path, index: HeldIndex) -> None:
    with started(tmp_path, index) as server:
        assert server.ask("GET", "/v2/health/live")[0] == 200
        assert not server.ready()
        assert not server.ready("adder")
        eventually(lambda: reason(server).startswith("LOADING: making an environment"))
        assert "nv_" in server.ask("GET", "/metrics", service="Metrics")[2].decode()
        with pytest.raises(RuntimeError, match=r"^404: .*no available versions"):
            server.infer("adder", [1.0])
        index.released.set()
        eventually(lambda: "Listening: " in server.text)
        assert server.ready()
        assert reason(server) == "READY: None"
        assert server.infer("adder", [1.0]) == [2.0]
    with started(tmp_path, index, Serving) as server:
        assert server.infer("adder", [1.0]) == [2.0]
        assert Preparing.started not in server.text, "nothing had to be made"


def test_stopped_meanwhile(tmp_path: Path, index: HeldIndex) -> None:
    with started(tmp_path, index) as server:
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(30) == 0


def test_what_cannot_be_made_ends_the_server(tmp_path: Path, index: HeldIndex) -> None:
    index.has_wheel = False
    with started(tmp_path, index, clean=False) as server:
        index.released.set()
        assert server.process.wait(60) == 1
        assert "failed to load all models" in server.text
