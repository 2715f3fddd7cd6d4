"""A run: the corpus first, then inputs in rounds, with a look at the server after each; what is found is shrunk.

A round is some hundred inputs of all surfaces at once. If something is wrong after it, they are sent again, to a server
of their own: one by one, then fewer and fewer, until a single one is left, which is shrunk in turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fuzz import case as cases_
from fuzz import shrinker, surfaces
from fuzz.case import Case
from fuzz.findings import Finding, Tally
from fuzz.lanes import Outcome
from fuzz.subject import Subject
from fuzz.symptoms import Symptom

ROUND: Final = 400
"""Inputs between two looks."""
_REST: Final = 12
"""Rounds after which the server comes to rest, and what it holds is counted."""
_WARM_UP: Final = 3
"""Rounds before that is done for the first time."""
_MAX_FINDINGS: Final = 20
_TRIALS: Final = 400
_SECONDS_TO_SHRINK: Final = 240.0
_OF_REST: Final = ("descriptors", "threads", "shared memory", "temporary files", "cycles")
"""Symptoms that are seen where a server has come to rest."""
_DAMAGE: Final = ("canary", "died", "no end", "a worker died", *_OF_REST[:-1])
"""Symptoms of a server that cannot be used any more to see whether something shows again."""

Make = Callable[[str, float], Subject]
"""Makes what is fuzzed, of a profile, with seconds of patience."""


@dataclass
class Plan:
    """What a run does."""

    seed: int
    names: list[str] = field(default_factory=lambda: list(surfaces.SURFACES))
    inputs: int = 0
    """How many; 0: as many as there is time for."""
    seconds: float = 0.0
    """How long; 0: until all inputs were sent."""
    profiles: Sequence[str] = ("plain",)
    folder: Path = Path("fuzz-findings")
    patience: float = 30.0
    shrink: bool = True
    corpus: Path = cases_.CORPUS


class Run:
    """One run of the fuzzer."""

    def __init__(self, make: Make, plan: Plan, say: Callable[[str], None] = print) -> None:
        self._make = make
        self._plan = plan
        self._say = say
        self._began = 0.0
        self._next = 0
        self._told = 0.0
        self.seconds = 0.0
        """How long inputs were sent, and looked after."""
        self.tally = Tally()
        self.findings: dict[tuple[str, str], Finding] = {}

    async def go(self) -> bool:
        """Do all of it; return whether nothing was found."""
        self._began = self._told = time.monotonic()
        for number, profile in enumerate(self._plan.profiles, 1):
            await self._with(profile, number / len(self._plan.profiles))
            if len(self.findings) >= _MAX_FINDINGS:
                self._say("That is enough: no more inputs are sent.")
                break
        return not self.findings

    async def _with(self, profile: str, part: float) -> None:
        """Send inputs to servers of a profile until this part of the run is over."""
        names = surfaces.of_profile(profile, self._plan.names)
        if not names:
            return
        try:
            subject = await self._started(profile)
        except RuntimeError as error:  # with the log
            self._note([Symptom("start", profile, str(error))], [], profile)
            return
        try:
            for name, kept in cases_.corpus(self._plan.corpus):
                if kept.profile in ("", profile) and all(case.surface in names for case in kept.cases):
                    subject = await self._send(subject, list(kept.cases), 1, f"{name} ")
            rounds = 0
            while self._left(part) > 0 and len(self.findings) < _MAX_FINDINGS:
                count = min(ROUND, self._left(part))
                drawn = surfaces.draw(self._plan.seed, names, self._next, count)
                self._next += count
                rounds += 1
                subject = await self._send(subject, drawn, rounds)
                self._tell()
            self._note(await subject.rest(), [], profile)
            self._note(subject.over(), [], profile)
        finally:
            self._note(await subject.stop(), [], profile)

    def _left(self, part: float) -> int:
        """Return how many inputs are left in this part of the run."""
        plan = self._plan
        if plan.seconds and time.monotonic() - self._began >= plan.seconds * part:
            return 0
        return round(plan.inputs * part) - self._next if plan.inputs else ROUND

    async def _started(self, profile: str, patience: float = 0.0) -> Subject:
        subject = self._make(profile, patience or self._plan.patience)
        await subject.start()
        return subject

    async def _send(self, subject: Subject, cases: list[Case], rounds: int, name: str = "") -> Subject:
        """Send a round and look; return the subject that goes on."""
        began = time.monotonic()
        outcomes = await subject.send(cases)
        self.tally.add(outcomes)
        found = complaints(outcomes)
        found += [(symptom, cases) for symptom in await subject.check()]
        if not found and (rounds == _WARM_UP or (rounds > _WARM_UP and not rounds % _REST)):
            found += [(symptom, cases) for symptom in await subject.rest()]
        self.seconds += time.monotonic() - began
        damaged = any(symptom.kind in _DAMAGE for symptom, _ in found)
        for symptom, suspects in found:
            if symptom.key in self.findings:
                self.findings[symptom.key].times += 1
                continue
            self._say(f"{name}{symptom.kind}: {symptom.where}")
            await self._investigate(symptom, suspects, cases, subject.profile)
        if damaged:
            await _abandoned(subject)
            subject = await self._started(subject.profile)
        return subject

    def _note(self, symptoms: Sequence[Symptom], cases: list[Case], profile: str) -> None:
        """Take in what cannot be traced to an input."""
        for symptom in symptoms:
            self._add(Finding(symptom, cases, profile, shown_again=False))

    def _add(self, finding: Finding) -> None:
        if finding.symptom.key not in self.findings:
            self.findings[finding.symptom.key] = finding
            self._say(f"{finding}\n    {finding.write(self._plan.folder, self._plan.seed)}")

    async def _investigate(self, symptom: Symptom, suspects: list[Case], cases: list[Case], profile: str) -> None:
        """Look for the least that shows a symptom, and write it down."""
        trials = Trials(self._started, symptom, profile)
        finding = Finding(symptom, suspects, profile, shown_again=False)
        try:
            if self._plan.shrink:
                for some in (suspects, cases):
                    if await trials.show(some):
                        finding.cases = await trials.least(some)
                        finding.shown_again = True
                        break
        finally:
            await trials.close()
        self._add(finding)

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told >= 5.0:
            self._told = now
            sent = sum(self.tally.inputs.values())
            self._say(f"{sent:,} inputs, {sent / max(self.seconds, 0.001):,.0f}/s, {len(self.findings)} findings")


class Trials:
    """Sends inputs again, to see whether a symptom shows."""

    def __init__(self, start: Callable[[str, float], Any], symptom: Symptom, profile: str) -> None:
        self._start = start
        self._symptom = symptom
        self._profile = profile
        self._subject: Subject | None = None
        self._left = _TRIALS
        self._until = time.monotonic() + _SECONDS_TO_SHRINK

    async def show(self, cases: list[Case]) -> bool:
        """Return whether the symptom shows when these are sent one after the other."""
        self._left -= 1
        if self._subject is None:
            self._subject = await self._start(self._profile, 8.0)
            if self._symptom.kind in _OF_REST:
                await self._subject.rest()
        found: list[Symptom] = []
        for case in cases:
            found += [symptom for symptom, _ in complaints(await self._subject.send([case], together=False))]
            if any(symptom.kind in _DAMAGE for symptom in found):  # what follows would only wait
                break
        found += await self._subject.check()
        if self._symptom.kind in _OF_REST and not found:
            found += await self._subject.rest()
        kinds = {symptom.kind for symptom in found}
        if kinds.intersection(_DAMAGE) and not (kinds == {"a worker died"} and await self._recovered()):
            await self.close()
        return any(symptom.key == self._symptom.key for symptom in found)

    async def _recovered(self) -> bool:
        """Wait until a server is as before; return whether it is."""
        assert self._subject is not None
        for _ in range(20):
            if not await self._subject.check():
                return True
            await asyncio.sleep(0.2)
        return False

    async def least(self, cases: list[Case]) -> list[Case]:
        """Return the fewest and least of some inputs that show it."""
        if len(cases) > 1:
            cases = await self._driven(shrinker.fewest(cases), self.show, cases)
        if len(cases) > 1:
            return cases
        fixed = surfaces.SURFACES[cases[0].surface].fixed

        async def shows(case: Case) -> bool:
            return await self.show([case])

        return [await self._driven(shrinker.least(cases[0], fixed), shows, cases[0])]

    async def _driven(self, steps: Any, fails: Callable[[Any], Any], best: Any) -> Any:
        """Run a trial for as long as may be; return the least that was found to fail."""
        try:
            candidate = next(steps)
            while self._left > 0 and time.monotonic() < self._until:
                verdict = await fails(candidate)
                if verdict:
                    best = candidate
                candidate = steps.send(verdict)
        except StopIteration as end:
            return end.value
        return best

    async def close(self) -> None:
        """End the server of the trials."""
        subject, self._subject = self._subject, None
        if subject is not None:
            await _abandoned(subject)


def complaints(outcomes: Sequence[Outcome]) -> list[tuple[Symptom, list[Case]]]:
    """Return what is wrong with the ends of inputs, each with the input."""
    found = []
    for outcome in outcomes:
        if outcome.complaint and outcome.complaint != "an internal error":
            kind = "no end" if outcome.complaint.startswith("no ") or "not closed" in outcome.complaint else "end"
            where = f"{outcome.case.surface}: {outcome.complaint}"
            found.append((Symptom(kind, where, outcome.said.decode(errors="replace")), [outcome.case]))
    return found


async def _abandoned(subject: Subject) -> None:
    """End a subject that may not be able to end by itself."""
    subject.kill()
    await subject.stop()


def go(make: Make, plan: Plan, say: Callable[[str], None] = print) -> Run:
    """Do a run."""
    import uvloop

    run = Run(make, plan, say)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run.go())
    return run
