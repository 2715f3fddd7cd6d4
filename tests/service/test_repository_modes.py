"""Control modes: none, explicit, poll; versions; and reloads that lose nothing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from onnx_models import identity, save
from serving import IDENTITY, adds, eventually, pbtxt, python_model, serving


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    python_model(models, "adder", adds(1))
    return models


def test_explicit_mode_loads_and_unloads_by_hand(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log", "--model-control-mode=explicit") as server:
        assert server.json("POST", "/v2/repository/index") == [{"name": "adder"}]
        assert server.ask("POST", "/v2/models/adder/infer")[0] == 404
        assert server.ask("POST", "/v2/repository/models/adder/load")[0] == 200
        assert server.infer("adder", [1.0]) == [2.0]
        eventually(lambda: len(server.workers()) == 1)
        assert server.ask("POST", "/v2/repository/models/adder/unload")[0] == 200
        eventually(lambda: server.state("adder") == "UNAVAILABLE")
        eventually(lambda: server.workers() == {})
        (entry,) = server.json("POST", "/v2/repository/index")
        assert entry["reason"] == "unloaded"
        assert server.ready()
        status, _, body = server.ask("POST", "/v2/repository/models/nothing/load")
        assert (status, body) == (
            500,
            b'{"error":"failed to load \'nothing\', failed to poll from model repository"}',
        )
        assert server.ask("POST", "/v2/repository/models/nothing/unload")[0] == 200


def test_startup_models(repository: Path, tmp_path: Path) -> None:
    python_model(repository, "other", IDENTITY)
    with serving(repository, tmp_path / "log", "--model-control-mode=explicit", "--load-model=other") as server:
        assert server.ready("other")
        assert not server.ready("adder")


def test_without_explicit_mode_nothing_is_loaded_by_hand(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log") as server:
        for verb in ("load", "unload"):
            status, _, body = server.ask("POST", f"/v2/repository/models/adder/{verb}")
            assert status == 503
            refusal, _, remedy = json.loads(body)["error"].partition("\n    ")
            assert refusal == "explicit model load / unload is not allowed if polling is enabled"
            assert remedy == (
                "Models are loaded when the server starts (--model-control-mode=none). To load and unload them by "
                "requests, start the server with --model-control-mode=explicit."
            )


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("explicit", "Load a model: curl -X POST http://127.0.0.1:{}/v2/repository/models/NAME/load"),
        ("poll", "Put a model into {}, and it is loaded automatically. Models follow the files of their repositories"),
        ("none", "Put a model into {}, and restart the server. Models are loaded when the server starts"),
    ],
)
def test_what_is_said_where_there_is_no_model(tmp_path: Path, mode: str, says: str) -> None:
    models = tmp_path / "models"
    models.mkdir()
    with serving(models, tmp_path / "log", f"--model-control-mode={mode}") as server:
        assert says.format(server.ports["HTTPService"] if mode == "explicit" else models) in server.text
        note = server.json("GET", "/ui/control")["note"]
        assert (note == "", f"--model-control-mode={mode}" in note) == (mode == "explicit", mode != "explicit")


def test_version_policies(repository: Path, tmp_path: Path) -> None:
    for version in (2, 3):
        python_model(repository, "adder", adds(version), version=version)
    everything = pbtxt() + "version_policy: { all {} }\n"
    python_model(repository, "every", adds(1), everything)
    python_model(repository, "every", adds(2), everything, version=2)
    some = pbtxt() + "version_policy: { specific { versions: [1, 3] } }\n"
    for version in (1, 2, 3):
        python_model(repository, "some", adds(version), some, version=version)
    latest = pbtxt() + "version_policy: { latest { num_versions: 2 } }\n"
    for version in (1, 2, 10):
        python_model(repository, "latest", adds(version), latest, version=version)
    with serving(repository, tmp_path / "log") as server:
        assert server.json("GET", "/v2/models/latest")["versions"] == ["2", "10"]
        assert server.infer("adder", [0.0]) == [3.0]
        assert server.infer("every/versions/1", [0.0]) == [1.0]
        assert server.infer("every/versions/2", [0.0]) == [2.0]
        assert server.infer("every", [0.0]) == [2.0]
        assert server.json("GET", "/v2/models/some")["versions"] == ["1", "3"]
        with pytest.raises(RuntimeError, match="version 2 is not found"):
            server.infer("some/versions/2", [0.0])


def test_settings_of_a_backend(tmp_path: Path) -> None:
    save(tmp_path / "models" / "m", identity())
    with serving(
        tmp_path / "models", tmp_path / "log", "--backend-config=onnxruntime,default-max-batch-size=7"
    ) as server:
        assert server.json("GET", "/v2/models/m/config")["max_batch_size"] == 7


def test_fields_without_effect_are_told(repository: Path, tmp_path: Path) -> None:
    python_model(repository, "adder", adds(1), pbtxt() + "optimization { eager_batching: true graph { level: 1 } }")
    with serving(repository, tmp_path / "log") as server:
        assert "'adder': 'optimization.eager_batching' has no effect: " in server.text
        assert "'adder': 'optimization.graph' has no effect with backend 'python': " in server.text


def test_a_failed_reload_leaves_what_was_serving(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log", "--model-control-mode=explicit", "--load-model=adder") as server:
        (repository / "adder" / "1" / "model.py").write_text("this is no python")
        status, _, body = server.ask("POST", "/v2/repository/models/adder/load")
        assert status == 400
        assert b"load failed for model 'adder': version 1 is at UNAVAILABLE state" in body
        assert b"invalid syntax" in body
        assert server.infer("adder", [1.0]) == [2.0]
        assert server.ready()


def test_reload_under_load_loses_nothing(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log", "--model-control-mode=explicit", "--load-model=adder") as server:
        stop = threading.Event()
        answers: list[float] = []
        failures: list[str] = []

        def call() -> None:
            while not stop.is_set():
                try:
                    answers.extend(server.infer("adder", [0.0]))
                except RuntimeError as error:
                    failures.append(str(error))

        callers = [threading.Thread(target=call) for _ in range(4)]
        for caller in callers:
            caller.start()
        for amount in range(2, 8):
            python_model(repository, "adder", adds(amount))
            assert server.ask("POST", "/v2/repository/models/adder/load")[0] == 200
            assert server.infer("adder", [0.0]) == [float(amount)]
        stop.set()
        for caller in callers:
            caller.join()
        assert failures == []
        assert set(answers) <= {float(amount) for amount in range(1, 8)}
        assert len(set(answers)) > 3
        eventually(lambda: len(server.workers()) == 1, what="old workers stay behind")


@pytest.mark.parametrize("mode", ["worker", "in_process"])
def test_instances_come_and_go_while_the_others_stay(repository: Path, tmp_path: Path, mode: str) -> None:
    parameters = f'parameters {{ key: "EXECUTION_MODE" value {{ string_value: "{mode}" }} }}'
    config = pbtxt(parameters=parameters)
    say = "def initialize(self, args):\n    print('made', args['model_instance_name'], flush=True)\n"
    python_model(repository, "adder", say + adds(1), config)
    with serving(repository, tmp_path / "log", "--model-control-mode=explicit", "--load-model=adder") as server:

        def resize(count: int) -> int:
            group = f"instance_group [{{ kind: KIND_CPU count: {count} }}]"
            text = config.replace("instance_group [{ kind: KIND_CPU }]", group)
            assert text != config
            (repository / "adder" / "config.pbtxt").write_text(text)
            status: int = server.ask("POST", "/v2/repository/models/adder/load")[0]
            return status

        assert server.infer("adder", [1.0]) == [2.0]
        (first,) = server.workers().values() or [0]
        assert resize(3) == 200
        assert server.infer("adder", [1.0]) == [2.0]
        assert [server.text.count(f"made adder_0_{number}") for number in range(3)] == [1, 1, 1]
        if mode == "worker":
            assert len(server.workers()) == 3
            assert first in server.workers().values()
        assert server.json("GET", "/v2/models/adder/config")["instance_group"][0]["count"] == 3
        assert server.json("GET", "/v2/models/adder/stats")["model_stats"][0]["inference_count"] == 2
        assert resize(1) == 200
        if mode == "worker":
            eventually(lambda: list(server.workers().values()) == [first])
        assert server.infer("adder", [1.0]) == [2.0]
        written = server.json("GET", "/v2/models/adder/config")
        written["instance_group"][0]["count"] = 2
        sent = {"parameters": {"config": json.dumps(written)}}
        assert server.ask("POST", "/v2/repository/models/adder/load", sent)[0] == 200
        assert [server.text.count(f"made adder_0_{number}") for number in range(3)] == [1, 2, 1]
        if mode == "worker":
            assert len(server.workers()) == 2
            assert first in server.workers().values()
        assert resize(1) == 200
        assert server.text.count("loading: adder:1") == 1


FINALIZES = """
def finalize(self):
    time.sleep(0.5)
    with open({file!r}, "a") as file:
        file.write("gone\\n")
"""


def test_a_load_with_fewer_instances_answers_when_the_others_are_gone(repository: Path, tmp_path: Path) -> None:
    config, gone = pbtxt().replace("KIND_CPU }", "KIND_CPU count: 3 }"), tmp_path / "gone"
    python_model(repository, "adder", FINALIZES.format(file=str(gone)) + adds(1), config)
    with serving(repository, tmp_path / "log", "--model-control-mode=explicit", "--load-model=adder") as server:
        (repository / "adder" / "config.pbtxt").write_text(config.replace("count: 3", "count: 1"))
        assert server.ask("POST", "/v2/repository/models/adder/load")[0] == 200
        assert gone.read_text().splitlines() == ["gone"] * 2
        assert server.infer("adder", [1.0]) == [2.0]


def test_a_server_that_unloads_a_model_is_ready(repository: Path, tmp_path: Path) -> None:
    python_model(repository, "adder", FINALIZES.format(file=str(tmp_path / "gone")) + adds(1))
    with serving(repository, tmp_path / "log", "--model-control-mode=explicit", "--load-model=adder") as server:
        assert server.ready()
        assert server.ask("POST", "/v2/repository/models/adder/unload")[0] == 200
        while not (tmp_path / "gone").exists():
            assert server.ready()
        assert server.ready()


def test_an_instance_that_cannot_be_made_changes_nothing(repository: Path, tmp_path: Path) -> None:
    body = """
def initialize(self, args):
    if args["model_instance_name"] == "adder_0_2":
        raise ValueError("two is enough")
"""
    python_model(repository, "adder", body + adds(1))
    with serving(repository, tmp_path / "log", "--model-control-mode=explicit", "--load-model=adder") as server:
        before = server.workers()
        config = pbtxt().replace("kind: KIND_CPU", "kind: KIND_CPU count: 3")
        (repository / "adder" / "config.pbtxt").write_text(config)
        status, _, body_of_answer = server.ask("POST", "/v2/repository/models/adder/load")
        assert status == 400
        assert b"two is enough" in body_of_answer
        eventually(lambda: server.workers() == before)
        assert server.ready("adder")
        assert server.infer("adder", [1.0]) == [2.0]
        assert server.json("GET", "/v2/models/adder/config")["instance_group"][0]["count"] == 1


def test_a_load_that_failed_leaves_nothing(repository: Path, tmp_path: Path) -> None:
    body = """
def initialize(self, args):
    self.weights = open(__file__)
    raise ValueError("not today")
"""
    parameters = 'parameters { key: "EXECUTION_MODE" value { string_value: "in_process" } }'
    held = python_model(repository, "holder", body + adds(1), pbtxt(parameters=parameters)) / "1" / "model.py"
    with serving(repository, tmp_path / "log", "--model-control-mode=explicit") as server:
        status, _, answer = server.ask("POST", "/v2/repository/models/holder/load")
        assert (status, b"not today" in answer) == (400, True)
        open_files = []
        for descriptor in Path(f"/proc/{server.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                open_files.append(os.readlink(descriptor))
        assert open_files and str(held) not in open_files


def test_polling_follows_the_files(repository: Path, tmp_path: Path) -> None:
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with serving(repository, tmp_path / "log", *flags) as server:
        assert server.infer("adder", [0.0]) == [1.0]
        python_model(repository, "adder", adds(2), version=2)
        eventually(lambda: server.infer("adder", [0.0]) == [2.0], 12)  # without the flag after 15 s
        python_model(repository, "late", IDENTITY)
        eventually(lambda: server.ready("late"))
        shutil.rmtree(repository / "late")
        eventually(lambda: not server.ready("late"))
        eventually(server.ready)


def test_polling_does_not_load_what_is_half_written(repository: Path, tmp_path: Path) -> None:
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with serving(repository, tmp_path / "log", *flags) as server:
        model = python_model(repository, "adder", adds(2), version=2) / "2" / "model.py"
        whole = model.read_text()
        python_model(repository, "late", IDENTITY)
        longest, last = 0.0, time.monotonic()

        def writing() -> bool:
            nonlocal longest, last
            model.write_text(f"{whole[: len(whole) // 2]}\n# {last}\n")
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            return server.ready("late")

        eventually(writing)
        if longest > 0.5:
            pytest.skip("this machine is too busy to write to a file all the while")
        assert server.infer("adder", [0.0]) == [1.0]
        model.write_text(whole)
        # Times that a clock has brought which was wrong.
        os.utime(model, times=(time.time() + 3600,) * 2)
        eventually(lambda: server.infer("adder", [0.0]) == [2.0])
        assert "failed to load" not in server.text


@pytest.mark.parametrize(("retries", "loads"), [(0, False), (1, False), (2, True)])
def test_a_load_is_tried_again(repository: Path, tmp_path: Path, retries: int, loads: bool) -> None:
    tries = tmp_path / "tries"
    body = f"""
def initialize(self, args):
    with open({str(tries)!r}, "a") as file:
        file.write("x")
    if os.path.getsize({str(tries)!r}) < 3:
        raise RuntimeError("not yet")
"""
    python_model(repository, "adder", body + adds(1))
    flags = ("--model-control-mode=explicit", f"--model-load-retry-count={retries}")
    with serving(repository, tmp_path / "log", *flags) as server:
        status, _, answer = server.ask("POST", "/v2/repository/models/adder/load")
        assert status == (200 if loads else 400)
        assert (b"not yet" in answer) is not loads
        assert tries.read_text() == "x" * (retries + 1)
        assert server.text.count("failed to load 'adder' version 1, retrying") == retries


@pytest.mark.parametrize("threads", [1, 3])
def test_so_many_models_load_at_a_time(tmp_path: Path, threads: int) -> None:
    """Each model waits, as long as it has to, for as many others as may load beside it."""
    loading = tmp_path / "loading"
    loading.mkdir()
    body = f"""
def initialize(self, args):
    mine = os.path.join({str(loading)!r}, args["model_name"])
    open(mine, "w").close()
    deadline = time.monotonic() + 20
    while len(os.listdir({str(loading)!r})) < {threads} and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)  # in which others would come
    seen = len(os.listdir({str(loading)!r}))
    print("beside each other:", seen, flush=True)
    if {threads} == 1:
        os.remove(mine)
"""
    for number in range(3):
        python_model(tmp_path / "models", f"m{number}", body + IDENTITY)
    with serving(tmp_path / "models", tmp_path / "log", f"--model-load-thread-count={threads}") as server:
        assert server.text.count(f"beside each other: {threads}") == 3


@pytest.mark.parametrize("mode", ["none", "explicit", "demand"])
def test_files_that_are_bombs_fail_their_model_alone(repository: Path, tmp_path: Path, mode: str) -> None:
    bombs = {
        "pipe": "",
        "endless": "",
        "code": "",
        "large": "parameters { key: 'k' value { string_value: 'v' } }\n" * 40_000,
        "deep": "backend: 'llm'",
        "many": "instance_group { count: 2147483647 kind: KIND_CPU }",
        "broken": "model_warmup { inputs { " * 10_000,
    }
    for name, text in bombs.items():
        python_model(repository, name, adds(1), text)
    for name in ("pipe", "endless"):
        (repository / name / "config.pbtxt").unlink()
    os.mkfifo(repository / "pipe" / "config.pbtxt")
    (repository / "endless" / "config.pbtxt").symlink_to("/dev/zero")
    (repository / "code" / "1" / "model.py").unlink()
    os.mkfifo(repository / "code" / "1" / "model.py")
    (repository / "deep" / "1" / "config.json").write_text("[" * 200_000)
    flags = ["--exit-on-error=false", *(["--load-model=adder"] if mode == "explicit" else [])]
    with serving(repository, tmp_path / "log", f"--model-control-mode={mode}", *flags) as server:
        assert server.infer("adder", [1.0]) == [2.0]
        for name in bombs:
            with pytest.raises(RuntimeError):
                server.infer(name, [1.0])
            if mode == "explicit":
                status, _, body = server.ask("POST", f"/v2/repository/models/{name}/load")
                assert status >= 400, body
        assert server.infer("adder", [2.0]) == [3.0]
        if mode == "none":
            assert "bytes, and at most 1048576 are read" in server.text
            assert "it is not a regular file" in server.text
            assert "is a pipe or a device, not a file" in server.text
