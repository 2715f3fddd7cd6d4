"""Takes the effect of each entry of the ledger away, and sees whether the test that the entry names fails.

A test that passes all the same does not see what it is said to show. Each change is made in a copy of the tree, with an
environment of its own. A test of the shelf ``conformance`` is an exchange with the server: it fails if the answers are
others than without the change, for which no Triton is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from conformance.ask import ask
from conformance.compare import same, without_hashes
from conformance.servers import start_nerite
from conformance.topics import topics
from ledger import page
from ledger.mutations import mutation

ROOT: Final = Path(__file__).parents[2]
TIMEOUT: Final = 240.0
"""Seconds for one test. What takes longer has failed: a change may leave it waiting."""
PLAIN_TIMEOUT: Final = 3600.0
"""Seconds for all tests without a change."""
SEEN, NOT_SEEN, SKIPPED, BROKEN = "seen", "NOT SEEN", "skipped", "cannot run"
_PLAYED: Final = "played: "


class Entry(NamedTuple):
    """An entry of the ledger, and the test that it names."""

    section: str
    name: str
    test: str


def entries(pattern: str) -> list[Entry]:
    """Return the entries whose section and name, or test, match an expression."""
    every = (Entry(section.title, name, test) for section in page.sections() for name, test in section.works.items())
    return [each for each in every if re.search(pattern, f"{each.section}: {each.name}: {each.test}")]


class Copy:
    """A copy of the tree, in which one change at a time is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        self.python = _environment(folder)

    @contextmanager
    def changed(self, entry: Entry) -> Iterator[None]:
        """Take the effect of an entry away."""
        files: dict[Path, str] = {}
        try:
            for edit in mutation(entry.section, entry.name):
                path = self.folder / "src" / edit.file
                text = path.read_text()
                files.setdefault(path, text)
                path.write_text(edit.apply(text))
            yield
        finally:
            for path, text in files.items():
                path.write_text(text)

    def run(self, *arguments: str, seconds: float = TIMEOUT) -> tuple[int, str]:
        """Run Python there; return the exit status, and what it printed. A run that takes too long has status 1."""
        environment = {**os.environ, "PYTHONPATH": "tests", "PYTHONDONTWRITEBYTECODE": "1"}
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(
                [self.python, *arguments],
                cwd=self.folder,
                env=environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                status = 1
            said.seek(0)
            return status, said.read()

    def played(self, test: str) -> Any:
        """Return the answers of an exchange; None if the server does not start, or does not answer."""
        status, said = self.run("-m", "ledger.mutate", "--play", test)
        line = next((line for line in said.splitlines() if line.startswith(_PLAYED)), None)
        return None if status or line is None else json.loads(line.removeprefix(_PLAYED))

    def outcome(self, test: str) -> str:
        """Return what a test says of the change."""
        status, said = self._tested("-n", "0", f"tests/{test}", seconds=TIMEOUT)
        if status == 0:
            return NOT_SEEN if re.search(r"\d+ passed", said) else SKIPPED
        return SEEN

    def outcomes(self, tests: Sequence[str], jobs: int) -> dict[str, set[str]]:
        """Run tests without a change; return for each what its cases have done: PASSED, SKIPPED, FAILED, ERROR."""
        options = ("-rA", "-n", str(jobs), "--dist", "loadfile")
        _, said = self._tested(*options, *(f"tests/{test}" for test in tests), seconds=PLAIN_TIMEOUT)
        found: dict[str, set[str]] = {test: set() for test in tests}
        for status, name in re.findall(r"^(PASSED|FAILED|ERROR) tests/([^\s\[]+)", said, re.MULTILINE):
            found.setdefault(name, set()).add(status)
        return found

    def _tested(self, *arguments: str, seconds: float) -> tuple[int, str]:
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            options = ("-q", "-p", "no:cacheprovider", f"--basetemp={folder}/t")
            return self.run("-m", "pytest", *options, *arguments, seconds=seconds)


def _environment(folder: Path) -> Path:
    """Make an environment in a copy of the tree, with the packages of this one; return its interpreter."""
    place = folder / ".venv"
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    (packages,) = (place / "lib").glob("python*/site-packages")
    here = sysconfig.get_path("purelib")
    (packages / "a.pth").write_text(f"{folder / 'src'}\nimport site; site.addsitedir({here!r})\n")
    (place / "bin" / "uv").symlink_to(Path(sys.executable).with_name("uv"))
    for name in ("nerite", "tritonserver"):
        lines = (Path(sys.executable).parent / name).read_text().splitlines()
        script = place / "bin" / name
        script.write_text("\n".join([f"#!{python}", *lines[1:], ""]))
        script.chmod(0o755)
    return python


def play(test: str) -> None:
    """Print the answers to an exchange, in its scene."""
    name, _, exchange = test.partition(": ")
    (topic,) = (topic for topic in topics() if topic.name == name)
    with tempfile.TemporaryDirectory() as folder:
        server = start_nerite(topic.scene, Path(folder) / "scene")
        try:
            server.wait()
            answers = [without_hashes(answer) for answer in ask(server, topic.exchanges[exchange])]
        finally:
            server.stop()
    print(_PLAYED + json.dumps(answers, default=repr))


class Examination:
    """Tries entries, several at a time, and tells what becomes of them."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self._plain = Copy(folder / "plain")
        self._copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(jobs):
            self._copies.put(Copy(folder / str(number)))
        self._jobs = jobs
        self._answers: dict[str, Any] = {}
        self._plainly: dict[str, set[str]] = {}
        """What the cases of each test do without a change."""

    def of(self, listed: Sequence[Entry]) -> list[tuple[Entry, str]]:
        """Try entries; print each with what became of it."""
        began = time.monotonic()
        found: list[tuple[Entry, str]] = []
        tests = sorted({each.test for each in listed if "::" in each.test})
        self._plainly = self._plain.outcomes(tests, self._jobs) if tests else {}
        print(f"{len(tests)} tests without a change, {time.monotonic() - began:.0f} s", flush=True)
        with ThreadPoolExecutor(self._jobs) as pool:
            for entry, outcome in pool.map(self._try, listed):
                found.append((entry, outcome))
                place = f"{len(found)}/{len(listed)}, {time.monotonic() - began:.0f} s"
                print(f"{place}: {outcome}: {entry.name}  ({entry.test})", flush=True)
        return found

    def _try(self, entry: Entry) -> tuple[Entry, str]:
        copy = self._copies.get()
        try:
            if "::" in entry.test:
                if self._plainly[entry.test] - {"PASSED"}:
                    return entry, BROKEN
                with copy.changed(entry):
                    return entry, copy.outcome(entry.test)
            before = self._expected(entry.test)
            if before is None:
                return entry, BROKEN
            with copy.changed(entry):
                after = copy.played(entry.test)
            alike = after is not None and len(after) == len(before) and all(map(same, before, after))
            return entry, NOT_SEEN if alike else SEEN
        finally:
            self._copies.put(copy)

    def _expected(self, test: str) -> Any:
        """Return the answers of an exchange without any change."""
        if test not in self._answers:
            self._answers[test] = self._plain.played(test)
        return self._answers[test]


def main() -> int:
    """Try the entries that are asked for; return 1 if a test does not see that its entry is without effect."""
    parser = argparse.ArgumentParser(prog="python -m ledger.mutate", description=__doc__)
    parser.add_argument("--only", default="", help="entries of which section, name or test match this expression")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--play", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        play(options.play)
        return 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        found = Examination(Path(folder), options.jobs).of(entries(options.only))
    counts = Counter(outcome for _, outcome in found)
    print(f"\n{len(found)} entries: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    for entry, outcome in found:
        if outcome != SEEN:
            print(f"{outcome}: {entry.section}, {entry.name}: {entry.test}")
    return int(any(outcome in (NOT_SEEN, BROKEN) for _, outcome in found))


if __name__ == "__main__":
    sys.exit(main())
