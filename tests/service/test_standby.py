"""A server that stands by: live but not ready, and its models loaded when it is woken."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from serving import Serving, adds, ensemble, python_model, serving, step

WAKE = "/v2/repository/wake"


class StandingBy(Serving):
    """A server that waits to be woken."""

    started = "Stands by to load"


@contextmanager
def standing_by(models: Path, *flags: str, clean: bool = True) -> Iterator[Serving]:
    with serving(models, models.parent / "log", "--standby", *flags, kind=StandingBy, clean=clean) as server:
        yield server


def status(server: Serving, method: str, path: str, **headers: str) -> int:
    return server.ask(method, path, **headers)[0]


def test_the_models_are_loaded_when_it_is_woken(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "adder", adds(1))
    ensemble(models, "twice", step("adder", "INPUT0", "between"), step("adder", "between", "OUTPUT0"))
    with standing_by(models) as server:
        assert "Stands by to load 2 models" in server.text
        assert status(server, "GET", "/v2/health/live") == 200
        assert not server.ready()
        assert not server.ready("adder")
        assert server.workers() == {}
        for _ in range(2):
            assert status(server, "POST", WAKE) == 200
            assert server.ready()
        assert server.infer("twice", [[1.0]]) == [3.0]
        assert server.text.count("Nerite 0") == 1, "it was started once"


def test_in_explicit_mode_those_of_the_flags_are_loaded(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "one", adds(1))
    python_model(models, "other", adds(2))
    with standing_by(models, "--model-control-mode=explicit", "--load-model=one") as server:
        assert "Stands by to load 1 model:" in server.text
        assert status(server, "POST", WAKE) == 200
        assert server.ready("one")
        assert not server.ready("other")


def test_it_stops_like_any_other(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "adder", adds(1))
    with standing_by(models) as server:
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(30) == 0


def test_a_model_that_cannot_be_loaded_ends_it(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "broken", "def initialize(self, args):\n    raise ValueError('no')")
    with standing_by(models, clean=False) as server:
        with suppress(OSError):  # the connection ends with the server
            server.ask("POST", WAKE)
        assert server.process.wait(30) == 1
        assert "failed to load all models" in server.text


def test_waking_is_restricted_like_the_repository(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "adder", adds(1))
    with standing_by(models, "--http-restricted-api=model-repository:admin-key=secret") as server:
        assert status(server, "POST", WAKE) == 403
        assert not server.ready()
        assert status(server, "POST", WAKE, admin_key="secret") == 200
        assert server.ready()


def test_a_server_that_serves_cannot_be_woken(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "adder", adds(1))
    with serving(models, tmp_path / "log") as server:
        code, _, body = server.ask("POST", WAKE)
        assert code == 400
        assert "was started without --standby" in json.loads(body)["error"]


def test_files_are_read_ahead(tmp_path: Path) -> None:
    from nerite.repository.standby import read_ahead

    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "weights").write_bytes(np.zeros(9 << 20, np.uint8).tobytes())
    (tmp_path / "config.pbtxt").write_text("x" * 10)
    assert read_ahead(tmp_path) == (9 << 20) + 10
