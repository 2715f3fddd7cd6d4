"""The server that is fuzzed: ``nerite serve`` with a model of each kind, and what it is asked between inputs."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import ssl
import tempfile
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Final, Protocol

import trustme

from fuzz import administration, configurations, models, monitor, stored
from fuzz.batch_runs import Books, Runs, items, upload
from fuzz.canaries import Canaries
from fuzz.case import Case
from fuzz.inference import REGION_SIZE, REGIONS
from fuzz.lanes import Address, Calls, Kept, Outcome, Pieces, request
from fuzz.local import Reader
from fuzz.surfaces import CALLS, FRAMES, KEPT, LOADS, LOCAL, PIECES, RUNS, SURFACES
from fuzz.symptoms import Log, Symptom
from postgres_server import postgres_server
from routing import ROUTER, routing
from serving import NERITE, Serving, program, serving

PATIENCE: Final = 30.0
"""Seconds after which an input has no end, however busy the machine."""
ROOT: Final = Path(__file__).resolve().parents[2]
PROFILES: Final[dict[str, tuple[str, ...]]] = {
    "plain": (),
    "guarded": (
        "--policy-file={folder}/policy.toml", "--http-header-forward-pattern=.*", "--grpc-header-forward-pattern=.*",
        "--access-log=true", "--log-format=json",
    ),
    "half": (
        "--http-json-half-precision=true", "--grpc-infer-response-compression-level=high", "--log-verbose=1",
        "--http-cors-origin=*", "--metrics-config=summary_latencies=true",
    ),
    "cycles": (),
    "routed": (),
    "shared": (),
    "picker": (),
}  # fmt: skip
"""Flags beside those that the surfaces need.

``cycles``: what the collector of cycles finds is looked at, too. ``routed``: a router in front of the server gets what
is sent. ``shared``: a router with tenants, whose ledger and batches are in PostgreSQL. ``picker``: an endpoint picker
chooses the server.
"""
_FREED: Final = re.compile(r"Request$|\.grpc\.connection\.Call$|\.StreamCall$|\.HttpConnection$|^builtins\.traceback\b")
"""Kinds of objects that are never left for the collector: they hold what clients have sent."""
_FLAGS: Final = (
    "--model-control-mode=explicit", "--strict-readiness=false", "--allow-client-shm=true",
    "--cache-config=local,size=1048576", "--trace-config=triton,file={folder}/trace.json", "--trace-config=level=OFF",
    "--responses={folder}/responses.db", "--batches={folder}/batches.db", "--ledger={folder}/ledger.db",
    "--rollout-state={folder}/rollouts",
    *(f"--load-model={name}" for name in models.LOADED),
)  # fmt: skip
_TOGETHER: Final = {KEPT: 6, LOADS: 2, RUNS: 4, PIECES: 12, FRAMES: 10, CALLS: 14}
"""How many inputs of a kind are under way at a time; of those on kept connections, how many connections."""
_numbers: Final = itertools.count()
_AHEAD: Final = 6
"""How many requests are sent on a kept connection before the first is answered."""
_LARGEST_TRACE: Final = 50_000_000
_REGIONS_RELEASED: Final = 5.0
"""Seconds within which requests that were cancelled release their shared memory regions."""


class Subject(Protocol):
    """What is fuzzed. Whatever it is, it can be started again."""

    profile: str

    async def start(self) -> None:
        """Start it, and return when it answers."""

    async def send(self, cases: Sequence[Case], *, together: bool = True) -> list[Outcome]:
        """Send inputs, many at once or one after the other; return what became of each."""

    async def check(self) -> list[Symptom]:
        """Return what is wrong with it now."""

    async def rest(self) -> list[Symptom]:
        """Let it come to rest; return what it holds that it did not hold at first."""

    def over(self) -> list[Symptom]:
        """Return what has become more all the time, at the end of a run."""

    async def stop(self) -> list[Symptom]:
        """End it; return what is wrong with how it ended."""

    def kill(self) -> None:
        """End it at once: it may not be able to end by itself."""


class Server:
    """A server, its repository, its temporary files and its shared memory."""

    def __init__(self, profile: str = "plain", *, tls: bool = False, patience: float = PATIENCE) -> None:
        self.profile = profile
        self._tls = tls
        self._patience = patience
        self._stack = ExitStack()
        self._key = f"nerite_fuzz_{os.getpid() % 100_000:05d}{next(_numbers) % 100:02d}".encode()
        self._disk = asyncio.Lock()
        self.samples: list[monitor.Sample] = []
        self._folder: Path
        self._serving: Serving
        self._front: Serving | None = None
        """The router or the picker, if there is one."""
        self._front_log: Log
        self._ids: dict[str, str] = {}
        """What stands for which id of this run."""

    # Its life

    async def start(self) -> None:
        """Start it, and return when it answers."""
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="nerite-fuzz-")))
        models.write(self._folder / "models")
        (self._folder / "tmp").mkdir()
        (self._folder / "policy.toml").write_text(_POLICY)
        for name in "ab":
            file = Path("/dev/shm") / f"{self._key.decode()}_{name}"
            file.write_bytes(bytes(REGION_SIZE))
            self._stack.callback(file.unlink, missing_ok=True)
        flags = [flag.format(folder=self._folder) for flag in (*_FLAGS, *PROFILES[self.profile])]
        client = None
        if self._tls:
            flags += self._certificates()
            client = ssl.create_default_context(cafile=str(self._folder / "ca.pem"))
        environment = {
            "TMPDIR": str(self._folder / "tmp"),
            "PYTHONPATH": self._python_path(),
            "CUDA_VISIBLE_DEVICES": "",
        }
        if self.profile == "cycles":
            environment["FUZZ_COLLECTOR"] = str(self._folder)
        # Whatever is wrong is told here, as a finding.
        running = serving(
            self._folder / "models",
            self._folder / "log",
            *flags,
            environment=environment,
            clean=False,
            internal_errors=True,
        )
        try:
            self._serving = await asyncio.to_thread(self._stack.enter_context, running)
        except BaseException:
            self._stack.close()
            raise
        ports = self._serving.ports
        own, page = Address(ports["HTTPService"], client), Address(ports["Metrics"])
        if (front := self._in_front()) is not None:
            self._front = await asyncio.to_thread(self._stack.enter_context, front)
            self._front_log = Log(self._front.log)
            ports = ports | self._front.ports
        if self.profile == "picker":
            ports["GRPCInferenceService"] = ports["ExternalProcessor"]
        http, grpc = Address(ports["HTTPService"], client), Address(ports["GRPCInferenceService"], client)
        self._kept = [Kept(http, self._patience) for _ in range(_TOGETHER[KEPT])]
        self._loads = [Kept(http, self._patience) for _ in range(_TOGETHER[LOADS])]
        self._runs = [Kept(http, self._patience) for _ in range(_TOGETHER[RUNS])]
        self._calls = [Calls(grpc, self._patience) for _ in range(2)]
        self._pieces = {"http": Pieces(http, self._patience), "http2": Pieces(grpc, self._patience)}
        self._pieces["metrics"] = Pieces(Address(ports["Metrics"]), self._patience)
        self._own = Kept(own, self._patience)
        self._pages = [Kept(each, self._patience) for each in {page, Address(ports["Metrics"])}]
        self._asks = Kept(http, self._patience)
        self._canaries = Canaries(self._asks, self._calls[0])
        self._books = Books(self._asks, tenants=self.profile in ("guarded", "shared"))
        self._reader = Reader()
        self._stack.callback(self._reader.close)
        self._log = Log(self._folder / "log")
        self._before = monitor.shared_memory_of(self._serving.process.pid)
        self._errors: dict[str, float] = {}
        await self._settle()

    def _in_front(self) -> AbstractContextManager[Serving] | None:
        """Return what starts the router or the picker; None if there is neither."""
        pool = _pool(self._serving)
        if self.profile == "picker":
            file = self._folder / "cluster.toml"
            file.write_text(pool)
            command = [NERITE, "pick", file, "--port", "0", "--metrics-port", "0"]
            return program(command, self._folder / "picker.log", clean=False, internal_errors=True)
        if self.profile not in ("routed", "shared"):
            return None
        stores = f'ledger = "{self._folder}/router-ledger.db"\nbatches = "{self._folder}/router-batches.db"\n'
        if self.profile == "shared":
            database = self._stack.enter_context(postgres_server(self._folder / "postgres"))
            stores = f'ledger = "{database}"\nbatches = "{database}"\nbatch-files = "{self._folder}/router-files"\n'
            stores += f'policy-file = "{self._folder}/policy.toml"\n'
        return routing(self._folder, pool, router=ROUTER + stores, clean=False)

    def _python_path(self) -> str:
        inside = str(Path(__file__).with_name("inside")) if self.profile == "cycles" else ""
        places = (str(ROOT / "tests" / "stand_ins" / "vllm"), inside, os.environ.get("PYTHONPATH", ""))
        return os.pathsep.join(place for place in places if place)

    def _certificates(self) -> list[str]:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self._folder / "ca.pem"))
        issued = authority.issue_cert("localhost", "127.0.0.1")
        issued.private_key_and_cert_chain_pem.write_to_path(str(self._folder / "server.pem"))
        flags = []
        for port in ("http", "grpc"):
            flags += [f"--{port}-use-ssl=true", f"--{port}-root-cert={self._folder}/ca.pem"]
            flags += [f"--{port}-server-{what}={self._folder}/server.pem" for what in ("cert", "key")]
        return flags

    @property
    def _dead(self) -> bool:
        return self._serving.process.poll() is not None

    async def stop(self) -> list[Symptom]:
        """End it; return what is wrong with how it ended."""
        found = []
        log = self._folder / "log"
        if self._dead:
            self._stack.close()
            return []
        await self._close_lanes()
        pids = [self._serving.process.pid, *monitor.processes_of(self._serving.process.pid)]
        try:
            for each in (self._front, self._serving):
                if each is not None and (status := await asyncio.to_thread(each.stop)):
                    found.append(Symptom("the end", "exit status", f"{status}"))
        except Exception as error:  # it was killed: it did not end
            found.append(Symptom("the end", "none", repr(error)))
        for _ in range(100):
            if monitor.ended(pids):
                break
            await asyncio.sleep(0.05)
        else:
            found.append(Symptom("the end", "processes", "some outlive the server"))
        found += self._told()
        if left := list((self._folder / "tmp").iterdir()):
            found.append(Symptom("the end", "temporary files", str(left)[:1_000]))
        shutil.copy(log, self.last_log) if found else None
        self._stack.close()
        return found

    @property
    def last_log(self) -> Path:
        """Where the log of a server is kept that did not end well."""
        return Path(tempfile.gettempdir()) / f"nerite-fuzz-{os.getpid()}.log"

    def kill(self) -> None:
        """End it at once: it may not be able to end by itself."""
        self._serving.process.kill()
        self._serving.process.wait()

    async def _close_lanes(self) -> None:
        await asyncio.gather(
            *(
                lane.close()
                for lanes in (self._kept, self._loads, self._runs, self._calls, (self._own, *self._pages, self._asks))
                for lane in lanes
            )
        )

    # Inputs

    async def send(self, cases: Sequence[Case], *, together: bool = True) -> list[Outcome]:
        """Send inputs, many at once or one after the other; return what became of each."""
        if not together:
            return [outcome for case in cases for outcome in await self.send([case])]
        outcomes: list[Outcome] = []
        queues: dict[str, deque[Case]] = {lane: deque() for lane in _TOGETHER}
        for case in cases:
            lane = SURFACES[case.surface].lane
            if lane == LOCAL:
                outcomes.append(self._reader.read(case))
            else:
                queues[lane].append(case)
        substitutes = [(administration.KEY.encode(), self._key)]
        substitutes += [(name.encode(), value.encode()) for name, value in self._ids.items()]

        async def kept(lane: Kept, queue: deque[Case], ahead: int) -> None:
            while queue:
                batch = [queue.popleft() for _ in range(min(ahead, len(queue)))]
                began = time.monotonic()
                found = await lane.send(batch, substitutes)
                seconds = (time.monotonic() - began) / len(batch)
                outcomes.extend(outcome._replace(seconds=seconds) for outcome in found)

        async def alone(queue: deque[Case], send: Callable[[Case], Awaitable[Outcome]]) -> None:
            while queue:
                began = time.monotonic()
                outcome = await send(queue.popleft())
                outcomes.append(outcome._replace(seconds=time.monotonic() - began))

        work: list[Awaitable[None]] = [kept(lane, queues[KEPT], _AHEAD) for lane in self._kept]
        work += [alone(queues[LOADS], lambda case, lane=lane: self._load(lane, case)) for lane in self._loads]
        work += [alone(queues[RUNS], Runs(lane).send) for lane in self._runs]
        for lane in (PIECES, FRAMES):
            work += [
                alone(queues[lane], lambda case: self._pieces[case.surface].send(case)) for _ in range(_TOGETHER[lane])
            ]
        for number in range(_TOGETHER[CALLS]):
            calls = self._calls[number % len(self._calls)]
            work.append(alone(queues[CALLS], lambda case, calls=calls: calls.send(case, substitutes)))
        await asyncio.gather(*work)
        return outcomes

    async def _load(self, lane: Kept, case: Case) -> Outcome:
        """Send a load; what is behind its body is a file in the repository by then, and where that is."""
        if len(case.parts) < 3:
            (outcome,) = await lane.send([case])
            return outcome
        async with self._disk:
            place = case.parts[3].decode() if len(case.parts) > 3 else f"{models.ON_DISK}/config.pbtxt"
            (self._folder / "models" / place).write_bytes(case.parts[2])
            (outcome,) = await lane.send([case])
        return outcome

    # What is wrong

    async def check(self) -> list[Symptom]:
        """Return what is wrong with it now."""
        if self._dead:
            return [Symptom("died", "server", f"exit status {self._serving.process.returncode}"), *self._told()]
        if self._front is not None and (status := self._front.process.poll()) is not None:
            return [Symptom("died", "front", f"exit status {status}"), *self._told()]
        found = await self._settle() or await self._provide() or await self._ask()
        found += self._told()
        before, self._errors = self._errors, await self._counted(_ERRORS)
        new = {name: count for name, count in self._errors.items() if count > before.get(name, 0)}
        if not any(each.kind == "unforeseen" for each in found):
            found += [Symptom("internal errors", name, str(count)) for name, count in new.items()]
        return found

    async def _ask(self) -> list[Symptom]:
        """Return which of the requests whose answers are known are not answered so."""
        if self.profile == "picker":
            return await self._canaries.pick(self._serving.http)
        return await self._canaries.ask() or await self._books.ask()

    async def _provide(self) -> list[Symptom]:
        """Have a file and a response that inputs may name, as one of them may have deleted them."""
        if self.profile == "picker":
            return []
        text = items("inside", 3)
        answer = {"model": "words", "input": "a", "max_output_tokens": 1}
        made = {
            stored.FILE: ("/v1/files", upload(text)),
            stored.RESPONSE: ("/v1/responses", request(b"POST /v1/responses", json.dumps(answer).encode())),
        }
        for name, (place, raw) in made.items():
            there = request(f"GET {place}/{self._ids.get(name, name)}".encode(), b"")
            for asked in (there, raw):
                answers, complaint = await self._asks.ask([asked])
                if answers and answers[0].status == 200:
                    self._ids[name] = json.loads(answers[0].body)["id"]
                    break
            else:
                said = answers[0].body.decode(errors="replace") if answers else complaint
                return [Symptom("canary", place, said[:1_000])]
        if self._books.runs.last:
            self._ids[stored.BATCH] = self._books.runs.last["id"]
        return []

    def _told(self) -> list[Symptom]:
        """Return what the logs tell."""
        return self._log.symptoms() + ([] if self._front is None else self._front_log.symptoms())

    async def _settle(self) -> list[Symptom]:
        """Set settings and regions to what they were at first."""
        asked = [
            request(f"POST {path}".encode(), json.dumps(document).encode())
            for _, path, document in administration.SETTLED
        ]
        for name, file in zip(REGIONS, "ab", strict=True):
            path = f"/v2/systemsharedmemory/region/{name}"
            document = {"key": f"/{self._key.decode()}_{file}", "byte_size": REGION_SIZE}
            asked.append(request(f"POST {path}/unregister".encode(), b""))
            asked.append(request(f"POST {path}/register".encode(), json.dumps(document).encode()))
        until = time.monotonic() + _REGIONS_RELEASED
        while True:
            answers, complaint = await self._own.ask(asked)
            wrong = [answer for answer in answers if answer.status != 200]
            # A region that a cancelled request still uses is unregistered once that has ended, as in Triton.
            used = any(b"already in manager" in answer.body for answer in wrong)
            if not used or time.monotonic() > until:
                break
            await asyncio.sleep(0.05)
        if wrong or complaint:
            return [Symptom("canary", "settings", complaint or f"{wrong[0].status} {wrong[0].body[:1_000]!r}")]
        trace = self._folder / "trace.json"
        if trace.exists() and trace.stat().st_size > _LARGEST_TRACE:
            os.truncate(trace, 0)
        return []

    async def _counted(self, prefix: str) -> dict[str, float]:
        """Return the samples of the metrics pages whose names begin so."""
        found: Counter[str] = Counter()
        for page in self._pages:
            answers, _ = await page.ask([request(b"GET /metrics", b"")])
            for line in answers[0].body.decode().split("\n") if answers else []:
                name, _, count = line.rpartition(" ")
                found[name] += float(count) if name.startswith(prefix) else 0
        return {name: count for name, count in found.items() if name.startswith(prefix)}

    async def rest(self) -> list[Symptom]:
        """Let it come to rest; return what it holds that it did not hold at first."""
        if self._dead:
            return []
        await self._forget_foreign_segments()
        caches = int(sum((await self._counted(_CACHES)).values()))
        await self._close_lanes()
        pid = self._serving.process.pid
        before: monitor.Sample | None = None
        # Connections, and what guests had, end a moment after they are closed.
        for _ in range(200):
            sample = monitor.sample(pid, self._folder / "tmp", caches)
            if self._front is not None:
                sample = monitor.with_router(sample, self._front.process.pid)
            first = self.samples[0] if self.samples else before
            found = [Symptom("rest", "server", "")] if first is None else monitor.more_open(first, sample)
            if not found:
                break
            before = sample
            await asyncio.sleep(0.05)
        self.samples.append(sample)
        ours = {f"{self._key.decode()}_{name}" for name in "ab"}
        if more := monitor.shared_memory_of(pid) - self._before - ours:
            found.append(Symptom("shared memory", "server", str(sorted(more))))
        if self.profile == "cycles":
            found += await self._cycles()
        return found

    async def _cycles(self) -> list[Symptom]:
        """Return which objects the collector found that nothing but themselves held (see ``inside``)."""
        asked, told = self._folder / "asked", self._folder / "told"
        asked.touch()
        for _ in range(600):
            if told.exists():
                break
            await asyncio.sleep(0.05)
        kinds = json.loads(told.read_text())
        told.unlink()
        held = {kind: count for kind, count in kinds.items() if _FREED.search(kind)}
        return [Symptom("cycles", min(held), str(held))] if held else []

    async def _forget_foreign_segments(self) -> None:
        """Unload what loads have brought, forget regions that inputs have registered, and end rollouts."""
        for name in ("rollout.toml", "route.toml"):
            (self._folder / "models" / models.ROLLED / name).unlink(missing_ok=True)
        # The index has those of the repository alone.
        answers, _ = await self._own.ask([request(b"GET /v2/models/stats", b"")])
        running = json.loads(answers[0].body)["model_stats"] if answers else []
        names = {models.ON_DISK, *(each["name"] for each in running)} - {*models.LOADED}
        asked = [request(f"POST /v2/repository/models/{name}/unload".encode(), b"") for name in sorted(names)]
        asked += [request(f"POST {path}".encode(), json.dumps(body).encode()) for _, path, body in stored.SETTLED]
        asked.append(request(b"POST /v2/systemsharedmemory/unregister", b""))
        await self._own.ask(asked)
        await self._settle()

    def over(self) -> list[Symptom]:
        """Return what has become more all the time, at the end of a run."""
        return monitor.grown(self.samples)


def _pool(server: Serving) -> str:
    """Return the cluster file of a router in front of a server."""
    member = f'{{ http = "{server.http}", grpc = "{server.grpc}" }}'
    return f'[[pool]]\nname = "main"\nmembers = [{member}]\nhealth-interval = "5s"\n'


_CACHES: Final = "nerite_internal_cache_bytes"
_ERRORS: Final = "nerite_internal_errors_total"
_POLICY: Final = (
    configurations.POLICIES[0].replace("\n[default]", "\n[default]\nweight = 5")
    + """
[models."*"]
max_bytes = 10_000_000
[idempotency]
grace_seconds = 0.5
"""
)
