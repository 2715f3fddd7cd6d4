"""Downloads from the hub by its own library, from a stand-in for the hub: resumed, verified, shared, offline."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hub_stand_in import TOKEN, HubStandIn, hub_stand_in
from nerite.core.errors import Internal, InvalidArgument, NeriteError, NotFound, Unavailable
from nerite.core.transfer import DownloadProgress
from nerite.sources.hub_cache import HubCache
from nerite.sources.hub_download import DownloadPlan, FetchedFiles, FetchWatcher, HubFetcher
from nerite.sources.name import HubName

NAME = HubName("org/tiny")
WEIGHTS = bytes(range(256)) * 8192  # 2 MiB
FILES = {"model.safetensors": WEIGHTS, "config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}"}
DIGEST = hashlib.sha256(WEIGHTS).hexdigest()
PROGRAM = """
import os, sys
from nerite.sources.hub_download import FetchWatcher, HubFetcher
from nerite.sources.name import HubName
class Telling(FetchWatcher):
    def told(self, text): print(text, flush=True)
print(HubFetcher(os.environ, Telling()).fetch(HubName("org/tiny")).path)
"""


class Notes(FetchWatcher):
    """Notes what it is told."""

    def __init__(self, *, agrees: bool = True) -> None:
        self.lines: list[str] = []
        self.plans: list[DownloadPlan] = []
        self.seen: list[int] = []
        self.answer = agrees

    def told(self, text: str) -> None:
        self.lines.append(text)

    def agrees(self, plan: DownloadPlan) -> bool:
        self.plans.append(plan)
        return self.answer

    def progress(self, progress: DownloadProgress, total: int) -> None:
        self.seen.append(progress.done)


@pytest.fixture(scope="module")
def running() -> Iterator[HubStandIn]:
    with hub_stand_in() as hub:
        yield hub


@pytest.fixture
def hub(running: HubStandIn) -> HubStandIn:
    running.reset()
    running.publish("org/tiny", FILES)
    return running


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def fetch(
    hub: HubStandIn,
    home: Path,
    name: HubName = NAME,
    watcher: FetchWatcher | None = None,
    token: str = "",
    **settings: bool,
) -> FetchedFiles:
    return HubFetcher(hub.environment(home, token), watcher or Notes(), **settings).fetch(name)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def parts(home: Path) -> list[Path]:
    return sorted(home.rglob("*.nerite.part"))


def test_downloaded_once(hub: HubStandIn, home: Path) -> None:
    watcher = Notes()
    found = fetch(hub, home, watcher=watcher)
    commit = hub.models["org/tiny"]["main"].commit
    assert found.name == HubName("org/tiny", commit)
    assert content(found.path) == FILES
    (plan,) = watcher.plans
    assert (plan.licence, plan.missing, len(plan.choice.files)) == ("apache-2.0", sum(map(len, FILES.values())), 3)
    assert watcher.lines[0] == "downloading 'org/tiny': 3 files, 2.1 MB"
    assert watcher.lines[-1].startswith("downloaded 'org/tiny': 2.1 MB in ")
    hub.reads.clear()
    again = Notes()
    assert fetch(hub, home, watcher=again).path == found.path
    assert [read.path for read in hub.reads] == ["/api/models/org/tiny"], "only whether there is a newer state"
    assert again.plans == []
    hub.reads.clear()
    assert fetch(hub, home, found.name).path == found.path
    assert hub.reads == [], "a commit never changes"


def test_the_library_of_the_hub_finds_it(hub: HubStandIn, home: Path) -> None:
    found = fetch(hub, home)
    program = (
        "import huggingface_hub as h; print(h.snapshot_download('org/tiny')); print(len(h.scan_cache_dir().warnings))"
    )
    environment = {**os.environ, **hub.environment(home), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(found.path), "0"]


def test_what_the_library_of_the_hub_has_downloaded_is_not_downloaded_again(hub: HubStandIn, home: Path) -> None:
    program = "import huggingface_hub as h; print(h.snapshot_download('org/tiny'))"
    environment = {**os.environ, **hub.environment(home), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    hub.reads.clear()
    assert fetch(hub, home, offline=True).path == Path(done.stdout.strip())
    assert hub.reads == []
    fetch(hub, home)
    assert hub.downloads == []


def test_a_new_state_brings_only_what_changed(hub: HubStandIn, home: Path) -> None:
    before = fetch(hub, home)
    hub.publish("org/tiny", {**FILES, "config.json": b'{"model_type": "qwen3"}'})
    hub.reads.clear()
    after = fetch(hub, home)
    assert [path.rpartition("/")[2] for path in hub.downloads] == ["config.json"]
    assert (before.path / "config.json").read_bytes() == FILES["config.json"]
    assert (after.path / "config.json").read_bytes() == b'{"model_type": "qwen3"}'


def test_killed_and_resumed(hub: HubStandIn, home: Path) -> None:
    hub.stops_at = 1 << 20
    environment = {**os.environ, **hub.environment(home)}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.DEVNULL)
    assert hub.arrived_there.wait(60)
    part = home / "hub" / "models--org--tiny" / "blobs" / f"{DIGEST}.nerite.part"
    deadline = threading.Event()
    while not part.exists() or part.stat().st_size < 1 << 19:
        assert not deadline.wait(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    have = part.stat().st_size
    assert 0 < have < len(WEIGHTS)
    hub.goes_on.set()
    hub.stops_at = 0
    hub.reads.clear()
    watcher = Notes()
    found = fetch(hub, home, watcher=watcher)
    assert content(found.path) == FILES
    assert f"bytes={have}-" in {read.range for read in hub.reads if read.path == f"/{DIGEST}"}
    assert "of it here already" in watcher.lines[0]
    assert parts(home) == []


def test_broken_connections_are_resumed_at_once(hub: HubStandIn, home: Path) -> None:
    hub.breaks = [700_000, 300_000]
    assert content(fetch(hub, home).path) == FILES
    ranges = [read.range for read in hub.reads if read.path == f"/{DIGEST}"]
    assert len(ranges) == 3
    assert ranges[0] == ""
    assert ranges[1].startswith("bytes=")


def test_a_host_that_ignores_ranges(hub: HubStandIn, home: Path) -> None:
    hub.breaks = [700_000]
    hub.ignores_ranges = True
    assert content(fetch(hub, home).path) == FILES


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_another_content_than_stated_is_not_kept(hub: HubStandIn, home: Path, name: str) -> None:
    hub.spoilt = {name}
    with pytest.raises(Internal, match=rf"'{name}' of 'org/tiny' arrived with another content than {hub.url} states"):
        fetch(hub, home)
    assert not list(home.rglob("snapshots/*"))
    hub.spoilt = set()
    assert content(fetch(hub, home).path) == FILES


def test_more_bytes_than_stated_are_refused(hub: HubStandIn, home: Path) -> None:
    stated = {"model.safetensors": {"lfs": {"sha256": DIGEST, "size": 1000, "pointerSize": 130}}}
    hub.publish("org/tiny", FILES, stated=stated)
    with pytest.raises(NeriteError):
        fetch(hub, home)
    assert sum(part.stat().st_size for part in parts(home)) <= 1000


def test_a_path_that_leads_out(hub: HubStandIn, home: Path) -> None:
    hub.publish("org/tiny", {**FILES, "../../../evil.json": b"{}"})
    with pytest.raises(InvalidArgument, match="a file with a path that leads elsewhere"):
        fetch(hub, home)
    assert hub.downloads == []


def test_offline(hub: HubStandIn, home: Path) -> None:
    with pytest.raises(NotFound, match=r"'hf:org/tiny' is not on this machine, and downloads are off"):
        fetch(hub, home, offline=True)
    assert hub.reads == []
    found = fetch(hub, home)
    hub.reads.clear()
    assert fetch(hub, home, offline=True) == found._replace(licence="")
    environment = {**hub.environment(home), "HF_HUB_OFFLINE": "1"}
    assert HubFetcher(environment, Notes()).fetch(NAME).path == found.path
    (found.path / "tokenizer.json").unlink()
    with pytest.raises(NotFound, match=r"only partly on this machine \(tokenizer.json missing\)"):
        fetch(hub, home, offline=True)
    assert hub.reads == []


def test_a_hub_that_does_not_answer(hub: HubStandIn, home: Path) -> None:
    hub.status = 500
    with pytest.raises(Unavailable, match=r"is not on this machine, and the hub cannot be reached: .* status 500"):
        fetch(hub, home)
    hub.status = 0
    found = fetch(hub, home)
    hub.status = 500
    watcher = Notes()
    assert fetch(hub, home, watcher=watcher).path == found.path
    assert "fetched before, is used" in watcher.lines[0]
    with pytest.raises(Unavailable, match="cannot be reached"):
        environment = {**hub.environment(home / "other"), "HF_ENDPOINT": "http://127.0.0.1:9"}
        HubFetcher(environment, Notes()).fetch(NAME)


def test_models_that_need_an_account(hub: HubStandIn, home: Path) -> None:
    hub.gated = {"org/tiny"}
    with pytest.raises(InvalidArgument, match=rf"requires an account\.\n    Accept its terms at {hub.url}/org/tiny"):
        fetch(hub, home)
    with pytest.raises(InvalidArgument, match="the token of HF_TOKEN gives no access") as caught:
        fetch(hub, home, token="hf_wrongwrong")
    assert "hf_wrongwrong" not in str(caught.value)
    found = fetch(hub, home, token=TOKEN)
    assert content(found.path) == FILES
    sent = {read.path: read.authorization for read in hub.reads}
    assert sent["/api/models/org/tiny"] == f"Bearer {TOKEN}"
    assert sent[f"/{DIGEST}"] == "", "the token does not go to another host"


def test_names_that_do_not_exist(hub: HubStandIn, home: Path) -> None:
    with pytest.raises(NotFound, match=f"there is no model 'org/other' on {hub.url}"):
        fetch(hub, home, HubName("org/other"))
    with pytest.raises(NotFound, match="'org/tiny' has no revision 'v9'"):
        fetch(hub, home, HubName("org/tiny", "v9"))
    with pytest.raises(NotFound, match=r"has no file 'a.gguf'"):
        fetch(hub, home, HubName("org/tiny", "", "a.gguf"))


def test_one_file(hub: HubStandIn, home: Path) -> None:
    hub.publish("org/quantized", {"a-Q8_0.gguf": b"GGUF8", "a-F16.gguf": b"GGUF16", "config.json": b"{}"})
    found = fetch(hub, home, HubName("org/quantized", "", "a-F16.gguf"))
    assert (found.path.name, found.path.read_bytes()) == ("a-F16.gguf", b"GGUF16")
    assert fetch(hub, home, HubName("org/quantized", "", "a-F16.gguf"), offline=True).path == found.path
    with pytest.raises(NotFound, match="not on this machine"):
        fetch(hub, home, HubName("org/quantized", "", "a-Q8_0.gguf"), offline=True)


def test_programs_come_with_trust(hub: HubStandIn, home: Path) -> None:
    hub.publish("org/own", {**FILES, "modeling_own.py": b"x = 1"})
    before = fetch(hub, home, HubName("org/own"))
    assert not (before.path / "modeling_own.py").exists()
    after = fetch(hub, home, before.name, trusted=True)
    assert after.path == before.path
    assert (after.path / "modeling_own.py").read_bytes() == b"x = 1"


def test_several_processes_download_it_once(hub: HubStandIn, home: Path) -> None:
    hub.stops_at = 1 << 20
    environment = {**os.environ, **hub.environment(home)}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True)

    with start() as first:
        assert hub.arrived_there.wait(60)
        with start() as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "Another process downloads 'org/tiny': waiting for it.\n"
            hub.goes_on.set()
            outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    assert hub.downloads.count(f"/{DIGEST}") == 1


def test_too_little_space(hub: HubStandIn, home: Path) -> None:
    size = 1 << 50
    stated = {"model.safetensors": {"lfs": {"sha256": DIGEST, "size": size, "pointerSize": 130}}}
    hub.publish("org/tiny", FILES, stated=stated)
    with pytest.raises(Internal, match=r"there is not enough space in .*: 1125.9 TB are needed, and .* are free"):
        fetch(hub, home)
    assert hub.downloads == []


def test_a_disk_that_fills_up(hub: HubStandIn, home: Path) -> None:
    part = home / "hub" / "models--org--tiny" / "blobs" / f"{DIGEST}.nerite.part"
    part.parent.mkdir(parents=True)
    part.symlink_to("/dev/full")
    with pytest.raises(Internal, match=r"there is not enough space in .*: the disk is full.\n.*nerite downloads prune"):
        fetch(hub, home)


def test_without_consent_nothing_is_downloaded(hub: HubStandIn, home: Path) -> None:
    with pytest.raises(Unavailable, match="was not downloaded"):
        fetch(hub, home, watcher=Notes(agrees=False))
    assert hub.downloads == []


def test_removal_spares_what_is_used(hub: HubStandIn, home: Path) -> None:
    first = fetch(hub, home)
    hub.publish("org/tiny", {**FILES, "config.json": b'{"model_type": "qwen3"}'})
    second = fetch(hub, home)
    cache = HubCache(home / "hub")
    assert [(each.commit, each.names, each.complete) for each in cache.revisions()] == sorted(
        [(first.name.revision, (), True), (second.name.revision, ("main",), True)]
    )
    with cache.using("org/tiny"), pytest.raises(Unavailable, match="a server uses it"):
        cache.remove("org/tiny")
    with cache.downloading("org/tiny", lambda: None), pytest.raises(Unavailable, match="it is being downloaded"):
        cache.remove("org/tiny", [first.name.revision])
    assert cache.remove("org/tiny", [first.name.revision]) > 0
    assert not first.path.exists()
    assert content(second.path)["model.safetensors"] == WEIGHTS, "both had it"
    assert cache.remove("org/tiny") > len(WEIGHTS)
    assert cache.revisions() == []
