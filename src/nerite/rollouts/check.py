"""The check before a rollout: what differs between baseline and candidate, and what follows from it.

Files and configurations are compared, then the candidate is tried with real requests. If it is not loaded yet, it is
loaded for the trial, out of the reach of clients, and unloaded afterwards. Nothing that serves is changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from nerite.config.model_config import ModelConfig
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.models.running_version import RunningVersion
from nerite.rollouts import memory, trial_sample
from nerite.rollouts.configuration_differences import (
    configuration_differences,
    policy_differences,
    signature_differences,
)
from nerite.rollouts.difference import Difference, Severity, blocks, notes, ordered, warns
from nerite.rollouts.language_differences import engine_differences, language_differences
from nerite.rollouts.memory import VersionMemory
from nerite.rollouts.trials import TrialLimits, trial_differences
from nerite.server import InferenceServer

_INSPECT: Final = "nerite.llm.openai.inspection:inspect"
_INSPECT_SECONDS: Final = 60.0


class CheckLimits(NamedTuple):
    """Bounds of a check."""

    seconds: float = 300.0
    """For the whole check, the load of the candidate included."""
    memory: int = 0
    """Bytes that baseline and candidate may use together; 0: what is free on the host."""
    trials: TrialLimits = TrialLimits()


DEFAULT_LIMITS: Final = CheckLimits()


class CheckedArm(NamedTuple):
    """A version of a model as a command line names it."""

    model: str
    version: str
    """Empty for the version that requests go to which name none."""

    @classmethod
    def parse(cls, text: str, model: str) -> CheckedArm:
        """Read ``2``, a version of ``model``; or ``other`` or ``other/2``, another model."""
        name, slash, version = text.rpartition("/")
        if text == model:
            name, version = model, ""
        elif not slash:
            name, version = (model, text) if text.isdecimal() else (text, "")
        if not name or (version and not version.isdecimal()):
            raise InvalidArgument(
                f"'{text}' is neither a version, such as 2, nor a model, such as scorer_v2 or scorer/2"
            )
        return cls(name, version)


async def differences(
    server: InferenceServer, model: str, baseline: str, candidate: str, limits: CheckLimits = DEFAULT_LIMITS
) -> list[Difference]:
    """Return what differs between two versions of a model, or between two models; what blocks a rollout comes first.

    ``baseline`` and ``candidate`` are versions, or models if the two arms are models. A candidate that cannot be loaded
    or hangs is a difference that blocks. Raises ``NeriteError`` if the baseline is not loaded, or a model unknown.
    """
    one, other = CheckedArm.parse(baseline, model), CheckedArm.parse(candidate, model)
    before = server.manager.find(*one)
    if other.version and not server.manager.meant(other.model).running.get(int(other.version)):
        if other.model != one.model:
            raise InvalidArgument(f"version {other.version} of model '{other.model}' is not loaded: load it first")
    elif server.manager.find(*other) is before:
        raise InvalidArgument(f"baseline and candidate are the same version: {before.label} of '{before.name}'")
    check = _Check(server, before, other, limits)
    try:
        async with asyncio.timeout(limits.seconds):
            await check.run()
    except TimeoutError:
        text = f"The check did not end within {limits.seconds:g} s, while {check.stage}; the rest was not checked."
        check.found.append(blocks("time", "", "too slow, or hangs", text))
    return ordered(check.found)


def refuse_if_blocked(found: Iterable[Difference]) -> None:
    """Raise ``InvalidArgument`` with the differences that block a rollout, if there are any."""
    lines = [f"{each.subject}: {each.consequence}" for each in found if each.severity is Severity.BLOCKS]
    if lines:
        raise InvalidArgument("the candidate cannot replace the baseline: " + " ".join(lines))


class _Check:
    """One check in progress."""

    def __init__(
        self, server: InferenceServer, baseline: RunningVersion, candidate: CheckedArm, limits: CheckLimits
    ) -> None:
        self._server = server
        self._before = baseline
        self._arm = candidate
        self._limits = limits
        self.found: list[Difference] = []
        self.stage = "comparing memory"

    async def run(self) -> None:
        """Compare; what differs is added to ``found``."""
        manager = self._server.manager
        record = manager.meant(self._arm.model)
        running = record.find("") if not self._arm.version else record.running.get(int(self._arm.version))
        async with AsyncExitStack() as stack:
            if running is None:
                if await self._lacks_memory():
                    return
                self.stage = "loading the candidate"
                try:
                    running = await stack.enter_async_context(manager.trial(self._arm.model, int(self._arm.version)))
                except NeriteError as error:
                    text = f"The candidate cannot be loaded: {error.message}"
                    self.found.append(blocks("load", f"version {self._before.label} is ready", "fails", text))
                    return
            await self._compare(running)

    async def _lacks_memory(self) -> bool:
        """Estimate whether there is memory for both; return whether there is not."""
        before = await self._memory(self._before, self._before.label, self._before.memory)
        after = await self._memory(self._before, self._arm.version, 0)
        room = await asyncio.to_thread(memory.read_room, self._limits.memory)
        self.found += memory.room_differences(before, after, room)
        return any(each.severity is Severity.BLOCKS for each in self.found)

    async def _memory(self, running: RunningVersion, version: str, measured: int) -> VersionMemory:
        directory = self._server.version_directory(running)
        place = None if directory is None else directory.with_name(version)
        return await asyncio.to_thread(memory.read_version, place, running.config, measured)

    async def _compare(self, after: RunningVersion) -> None:
        before = self._before
        self.stage = "comparing configurations"
        self.found += signature_differences(before.signature, after.signature)
        self.found += configuration_differences(before.config, after.config)
        if after.name == before.name:
            record = self._server.manager.meant(before.name)
            policy = None if record.loaded is None else record.loaded.polled.config.version_policy
            self.found += policy_differences(policy, record.running, before.version, after.version)
        if before.generates and after.generates:
            self.stage = "comparing tokenizers and chat templates"
            await self._compare_languages(after)
        elif before.generates != after.generates:
            text = "Only one of the two is a language model on an engine."
            self.found.append(warns("engine", before.config.backend, after.config.backend, text))
        self.stage = "trying the candidate"
        directory = self._server.version_directory(before)
        samples = await asyncio.to_thread(
            trial_sample.samples_of, before, None if directory is None else directory.parent
        )
        self.found += await trial_differences(before, after, samples, self._limits.trials)
        self.found += memory.measured_differences(before.memory, after.memory, self._limits.memory)

    async def _compare_languages(self, after: RunningVersion) -> None:
        try:
            facts = [await self._inspect(each) for each in (self._before, after)]
        except NeriteError as error:
            text = f"Tokenizer, chat template and sampling defaults were not compared: {error.message}"
            self.found.append(warns("files of the language model", "", "cannot be read", text))
        else:
            self.found += language_differences(*facts)
        reports = [next(iter(each.tokens.latest), None) if each.tokens else None for each in (self._before, after)]
        if reports[0] is not None and reports[1] is not None:
            self.found += engine_differences(reports[0], reports[1])
        else:
            self.found.append(notes("engine state", "", "", "An engine has not reported its context window yet."))

    async def _inspect(self, running: RunningVersion) -> dict[str, Any]:
        """Read the files of a language model in a helper process."""
        directory = self._server.version_directory(running)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        def answered(values: list[Any], error: NeriteError | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error.without_frames())
            else:
                answer.set_result(values[0])

        arguments = [str(directory or Path()), running.parameter("CHAT_TEMPLATE"), *_engine(running.config)]
        what = f"reading the files of version {running.label}"
        call = self._server.helpers.call(_INSPECT, arguments, answered, what, seconds=_INSPECT_SECONDS)
        try:
            return await answer
        except asyncio.CancelledError:
            call.cancel()
            raise


def _engine(config: ModelConfig) -> tuple[str, list[str]]:
    """Return the engine that a configuration names, empty if it leaves the choice open, and its instances' kinds."""
    named = config.parameters["ENGINE"].string_value if "ENGINE" in config.parameters else ""
    if not named and config.backend != "llm":
        named = config.backend
    return named, [group.kind for group in config.instance_group]
