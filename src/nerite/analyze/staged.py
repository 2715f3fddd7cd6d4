"""A repository in which some models have other configurations, beside the one that there is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nerite.config.loading import CONFIG_FILE


@contextmanager
def staged(repository: Path, texts: Mapping[str, str]) -> Iterator[Path]:
    """Yield a repository that is like another, but for the texts of config.pbtxt by model. It has links, no copies."""
    with tempfile.TemporaryDirectory(prefix="nerite-analyze-") as folder:
        for child in repository.resolve().iterdir():
            here = Path(folder, child.name)
            if child.name not in texts:
                here.symlink_to(child)
                continue
            here.mkdir()
            for part in child.iterdir():
                if part.name != CONFIG_FILE:
                    (here / part.name).symlink_to(part)
            if texts[child.name]:
                (here / CONFIG_FILE).write_text(texts[child.name], encoding="utf-8")
        yield Path(folder)
