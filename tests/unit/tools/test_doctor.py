"""What ``nerite doctor`` makes of what it finds."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nerite.tools import doctor, doctor_expected, doctor_machine
from nerite.tools.doctor_expected import Expected, node_findings
from nerite.tools.doctor_machine import GB, MB, FindingLevel, MachineMemory, Requirement, fits, parsed
from nerite.transports.tcp import owner_of

STAND_IN = Path(__file__).resolve().parents[2] / "stand_ins" / "nvml"


def test_cores() -> None:
    assert doctor_machine.of_cores(8, 8, 0) == (FindingLevel.OK, "8 cores", "")
    assert doctor_machine.of_cores(2, 64, 2).text == "2 of 64 cores: the CPU quota allows 2"
    assert "affinity" in doctor_machine.of_cores(4, 64, 0).text
    assert doctor_machine.of_cores(1, 1, 0).remedy


def test_a_python_whose_archives_cannot_be_trusted() -> None:
    for version in ((3, 11, 7), (3, 12, 10), (3, 13, 3)):
        (found,) = doctor_machine.of_python(version)
        assert found.level is FindingLevel.WARNING
        assert "CVE-2025-4517" in found.text
    (found,) = doctor_machine.of_python((3, 11, 12))
    assert found.remedy.startswith("Install Python 3.11.13 or newer.")
    for version in ((3, 11, 13), (3, 12, 11), (3, 13, 4), (3, 14, 0)):
        assert list(doctor_machine.of_python(version)) == []


def test_memory(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text(f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB\n")
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("max\n")
    assert doctor_machine.memory(meminfo, cgroup) == MachineMemory(64 * GB, 32 * GB, 0, 0)
    (cgroup / "memory.max").write_text(f"{2 * GB}\n")
    (cgroup / "memory.current").write_text(f"{GB + GB // 2}\n")
    found = doctor_machine.of_memory(doctor_machine.memory(meminfo, cgroup))
    assert (found.level, found.text) == (
        FindingLevel.WARNING,
        "512 MB free of 2.0 GB of memory that the container may use",
    )
    assert doctor_machine.of_memory(MachineMemory(64 * GB, 32 * GB, 0, 0)).text == "32.0 GB free of 64.0 GB of memory"
    assert doctor_machine.of_memory(MachineMemory(64 * GB, 32 * GB, 1 << 62, 5)).level is FindingLevel.OK, (
        "no limit, as cgroup 1 says it"
    )
    assert (
        doctor_machine.of_memory(doctor_machine.memory(tmp_path / "none", tmp_path / "none")).level is FindingLevel.NOTE
    )


def test_where_environments_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "not" / "made" / "yet"
    assert doctor_machine.of_disk(place).text.startswith(f"environments and converted models are stored in {place}: ")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert "not writable" in doctor_machine.of_disk(place).text


@pytest.mark.parametrize(
    ("found", "level"),
    [
        (doctor.of_files(1024), FindingLevel.WARNING),
        (doctor.of_files(1 << 20), FindingLevel.OK),
        (doctor.of_files(-1), FindingLevel.OK),
        (doctor.of_processes(100), FindingLevel.WARNING),
        (doctor.of_processes(-1), FindingLevel.OK),
        (doctor.of_shared(64 * MB, 64 * MB), FindingLevel.NOTE),
        (doctor.of_shared(GB, GB), FindingLevel.OK),
    ],
)
def test_limits(found: doctor.DoctorFinding, level: FindingLevel) -> None:
    assert found.level is level
    assert bool(found.remedy) == (level is not FindingLevel.OK)


@pytest.mark.parametrize(
    ("version", "bounds", "good"),
    [
        ("2.1", ">=2", True),
        ("2", ">=2.0.0", True),
        ("1.9.9", ">=2", False),
        ("2026.4.1.0", ">=2026.4,<2026.5", True),
        ("2026.5.0", ">=2026.4,<2026.5", False),
        ("2.13.0+cpu", ">=2.6", True),
        ("4.10", ">=4.9", True),
        ("1.0", "", True),
    ],
)
def test_versions(version: str, bounds: str, good: bool) -> None:
    assert fits(version, bounds) == good


def test_requirements() -> None:
    other = "linux" if sys.platform != "linux" else "darwin"
    given = [
        "numpy>=1.26",
        "hpack<5,>=4.0",
        "obstore>=0.9; extra == 'cloud'",
        f"a>=1; (sys_platform == '{sys.platform}') and extra == 'x'",
        f"b>=1; (sys_platform == '{other}') and extra == 'x'",
        "nerite[onnx]; extra == 'examples'",
    ]
    assert list(parsed(given)) == [
        Requirement("numpy", ">=1.26", ""),
        Requirement("hpack", "<5,>=4.0", ""),
        Requirement("obstore", ">=0.9", "cloud"),
        Requirement("a", ">=1", "x"),
        Requirement("nerite", "", "examples"),
    ]


def test_extras() -> None:
    wanted = [
        Requirement("one", ">=1", "all"),
        Requirement("two", ">=1", "all"),
        Requirement("one", ">=1", "part"),
        Requirement("three", "", "part"),
        Requirement("two", ">=3", "old"),
        Requirement("four", "", "dev"),
    ]
    old, there, missing = doctor_machine.of_extras(wanted, {"one": "1.0", "two": "2.0", "three": "", "four": ""}, {})
    assert (old.level, old.text) == (FindingLevel.WARNING, "the extra 'old' requires two>=3, but 2.0 is installed")
    assert old.remedy == "pip install 'nerite[old]'"
    assert there == (FindingLevel.OK, "installed extras: all (one 1.0, two 2.0)", "")
    assert (missing.level, missing.text) == (FindingLevel.NOTE, "extras that are not installed: part (lacks three)")


def test_an_extra_that_is_installed_and_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with it: an exception, or a library that ends the process."""
    (tmp_path / "half_there.py").write_text("import something_missing\n")
    (tmp_path / "wrong_processor.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = doctor_machine.broken(["half-there", "wrong-processor", "hpack"])
    assert found == {
        "half-there": "ModuleNotFoundError: No module named 'something_missing'",
        "wrong-processor": "the import crashes with SIGILL",
    }
    wanted = [Requirement("half-there", "", "framework"), Requirement("hpack", "", "good")]
    broken, there = doctor_machine.of_extras(wanted, {"half-there": "1.0", "hpack": "4.0"}, found)
    assert (broken.level, broken.remedy) == (FindingLevel.WARNING, "pip install --force-reinstall half-there")
    assert broken.text.startswith("the extra 'framework' does not work: half-there is installed but cannot be imported")
    assert there == (FindingLevel.OK, "installed extras: good (hpack 4.0)", "")


def test_what_nerite_cannot_be_without() -> None:
    wanted = [Requirement("one", ">=1", ""), Requirement("two", ">=3", ""), Requirement("three", ">=1", "")]
    first, second = doctor_machine.of_core(wanted, {"one": "", "two": "2.0", "three": "1.0"})
    assert (first.level, first.text, first.remedy) == (
        FindingLevel.PROBLEM,
        "Nerite requires one",
        "pip install 'one>=1'",
    )
    assert second.text == "Nerite requires two>=3, but 2.0 is installed"


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (found,) = doctor.port_findings([("--http-port", port)])
    assert found.level is FindingLevel.WARNING
    assert f"port {port} is in use by " in found.text and found.text.endswith(f" (pid {os.getpid()})")
    assert "--http-port=PORT" in found.remedy
    (found,) = doctor.port_findings([("--http-port", port)])
    assert found == (FindingLevel.OK, f"port {port} is free (--http-port)", "")


def test_a_port_of_somebody_who_cannot_be_named(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0\n"
    )
    assert owner_of(8000, tmp_path) is None
    descriptors = tmp_path / "12" / "fd"
    descriptors.mkdir(parents=True)
    (descriptors / "3").symlink_to("socket:[4711]")
    (tmp_path / "12" / "cmdline").write_bytes(b"nerite\0serve\0models\0")
    assert owner_of(8000, tmp_path) == (12, "nerite serve models")
    assert owner_of(8001, tmp_path) is None


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that says which GPUs there are."""
    monkeypatch.setenv("STAND_IN_GPUS", str(tmp_path / "gpus"))
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield tmp_path / "gpus"
    sys.modules.pop("pynvml", None)


def gpu(number: int, capability: list[int], used: int) -> dict[str, object]:
    return {"uuid": f"GPU-{number}", "name": f"G{number}", "capability": capability, "memory": [80 * GB, used * GB]}


def process(folder: Path, *words: str, environment: str = "") -> Path:
    """A process that was started with these words, as /proc shows it."""
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
    (folder / "environ").write_bytes(environment.encode())
    return folder


@pytest.mark.parametrize(
    ("words", "environment", "address", "mode"),
    [
        (["/usr/bin/python", "/opt/bin/nerite", "serve", "models"], "", "127.0.0.1", "none"),
        (["python", "-m", "nerite.cli.main", "serve", "m", "--address=::"], "", "::", "none"),
        (["python", "/b/tritonserver", "--model-store=m", "--model-control-mode=explicit"], "", "0.0.0.0", "explicit"),
        (["/b/nerite", "serve", "m"], "A=b\0NERITE_ADDRESS=0.0.0.0\0", "0.0.0.0", "none"),
    ],
)
def test_the_options_of_a_server_that_runs(
    tmp_path: Path, words: list[str], environment: str, address: str, mode: str
) -> None:
    options = doctor.options_of(process(tmp_path / "1", *words, environment=environment))
    assert options is not None
    assert (options.http.address, options.repository.control_mode) == (address, mode)


@pytest.mark.parametrize("words", [["nginx"], ["nerite", "top"], ["/b/nerite", "serve"], ["tritonserver", "--help"]])
def test_what_is_no_server(tmp_path: Path, words: list[str]) -> None:
    assert doctor.options_of(process(tmp_path / "1", *words)) is None
    assert doctor.options_of(tmp_path / "2") is None


def test_who_may_command_a_server(tmp_path: Path) -> None:
    public = doctor.options_of(process(tmp_path / "1", "tritonserver", "--model-store=m"))
    alone = doctor.options_of(process(tmp_path / "2", "nerite", "serve", "m"))
    assert public is not None and alone is not None
    found = doctor.of_options(public, "it")
    assert (found.level, found.text.startswith("it: anyone who can connect to HTTP (0.0.0.0:8000)")) == (
        FindingLevel.WARNING,
        True,
    )
    assert "--http-restricted-api=trace,logging:HEADER=@KEYFILE" in found.remedy
    assert doctor.of_options(alone, "it").level is FindingLevel.OK


def test_the_flags_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = doctor.access_findings([], tmp_path)
    assert found.level is FindingLevel.OK
    monkeypatch.setenv("NERITE_ADDRESS", "0.0.0.0")
    (found,) = doctor.access_findings([], tmp_path)
    assert found.level is FindingLevel.WARNING
    monkeypatch.setenv("NERITE_HTTP_PORT", "none")
    (found,) = doctor.access_findings([], tmp_path)
    assert (found.level, "NERITE_HTTP_PORT" in found.text) == (FindingLevel.PROBLEM, True)


def linked(number: int, *others: int) -> dict[str, object]:
    return {**gpu(number, [9, 0], 0), "linked": others}


def test_gpus_that_were_asked_for(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told.write_text(json.dumps([linked(0, 1), linked(1, 0)]))
    count, links = doctor_expected.findings(Expected(gpus=2, nvlink=True))
    assert (count, links.level) == ((FindingLevel.OK, "2 of the 2 GPUs that were asked for", ""), FindingLevel.OK)
    (fewer,) = doctor_expected.findings(Expected(gpus=4))
    assert (fewer.level, fewer.text) == (FindingLevel.PROBLEM, "2 of the 4 GPUs that were asked for")
    told.write_text(json.dumps([linked(0, 1), linked(1, 0), gpu(2, [9, 0], 0)]))
    (apart,) = doctor_expected.findings(Expected(nvlink=True))
    assert (apart.level, apart.text) == (FindingLevel.PROBLEM, "no NVLink between the GPUs 0 and 2, 1 and 2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (alone,) = doctor_expected.findings(Expected(nvlink=True))
    assert alone.level is FindingLevel.PROBLEM


def test_gpus_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (found,) = doctor_expected.findings(Expected(gpus=1))
    assert (found.level, found.text) == (FindingLevel.PROBLEM, "0 of the 1 GPUs that were asked for")


def test_ports_for_rdma(tmp_path: Path) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        (tmp_path / device / "ports" / "1").mkdir(parents=True)
        (tmp_path / device / "ports" / "1" / "state").write_text(state)
    assert doctor_expected.rdma_finding(1, tmp_path).level is FindingLevel.OK
    found = doctor_expected.rdma_finding(2, tmp_path)
    assert (found.level, found.text) == (FindingLevel.PROBLEM, "1 of the 2 active RDMA ports that were asked for")
    assert found.remedy.startswith("2 ports are there")
    assert doctor_expected.rdma_finding(1, tmp_path / "none").level is FindingLevel.PROBLEM


def test_nodes_of_a_group() -> None:
    here = {"LWS_GROUP_SIZE": "3", "LWS_LEADER_ADDRESS": "large-0.large.models"}
    known = ["large-0.large.models", "large-0-1.large.models", "large-0-2.large.models"]

    def found(wanted: int, names: list[str], environment: dict[str, str]) -> list[tuple[str, str]]:
        return [(each.level, each.text) for each in node_findings(wanted, environment, names.__contains__)]

    assert found(3, known, here) == [
        ("ok", "3 of the 3 nodes that were asked for"),
        ("ok", f"addresses of {', '.join(known)}"),
    ]
    assert found(3, known[:2], here)[1:] == [("problem", f"no address of {known[2]}")]
    assert found(2, known, here) == [("problem", "3 of the 2 nodes that were asked for")]
    assert found(2, known, {}) == [("problem", "this is no pod of a LeaderWorkerSet")]


def test_only_what_was_asked_for_is_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LWS_GROUP_SIZE", "1")
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "localhost")
    assert doctor.run(["--expect-nodes=1", "--json"]) == 0
    assert [each["part"] for each in json.loads(capsys.readouterr().out)] == ["expected"] * 2
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "nowhere.invalid")
    assert doctor.run(["--expect-nodes=1"]) == 1
    assert "no address of nowhere.invalid" in capsys.readouterr().out
    assert doctor.run(["--expect-gpus=0", "models"]) == 2
    assert "use two commands" in capsys.readouterr().err
    assert doctor.run(["--expect-gpus=-1"]) == 2
    assert "'-1' is not a number" in capsys.readouterr().err
