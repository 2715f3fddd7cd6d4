"""The shadows of all routes of a server: begun, changed and stopped as the routes change; their metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random

from nerite.observability.exposition import Page
from nerite.routes.shadow import FindShadow, RunningShadow
from nerite.routes.shadow_results import METRICS
from nerite.routes.shadow_samples import ShadowSamples
from nerite.routes.table import RouteTable


class RunningShadows:
    """The shadows by route. For the loop's thread only."""

    def __init__(
        self,
        routes: RouteTable,
        find: FindShadow,
        loop_of: Callable[[], asyncio.AbstractEventLoop] = asyncio.get_running_loop,
    ) -> None:
        """``find`` returns the version that a request to a shadow goes to."""
        self._loop_of = loop_of
        self._routes = routes
        self._find = find
        self._coin = Random()
        self._running: dict[str, RunningShadow] = {}
        self._stopped = False

    def follow(self) -> None:
        """Begin the shadows of new routes, and stop those that their routes no longer have."""
        wanted = {route.name: route.shadow for route in self._routes if route.shadow is not None}
        before = dict(self._running)
        for name, settings in {} if self._stopped else wanted.items():
            state, running = self._routes.state(name), before.get(name)
            assert state is not None
            if running is None or running.settings != settings or state.shadow is not running:
                samples = ShadowSamples(Path(settings.samples)) if settings.samples else None
                made = RunningShadow(name, settings, self._find, self._loop_of(), self._coin, samples)
                if running is not None and running.settings.arm == settings.arm:
                    made.results = running.results
                state.shadow = self._running[name] = made
        for name, running in before.items():
            if self._running[name] is not running:
                running.stop()
            elif name not in wanted or self._stopped:
                running.stop()
                del self._running[name]
                if (state := self._routes.state(name)) is not None:
                    state.shadow = None

    def stop(self) -> None:
        """Stop all shadows, because the server shuts down: nobody waits for their answers."""
        self._stopped = True
        self.follow()

    def write_metrics(self, page: Page) -> None:
        """Write the metrics of the shadows."""
        rows = [
            METRICS.row(running.results, name, running.settings.arm.label)
            for name, running in sorted(self._running.items())
        ]
        if rows:
            page.write(METRICS, rows)
