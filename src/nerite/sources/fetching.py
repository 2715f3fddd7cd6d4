"""Fetches a model by its name, wherever it is, and has it protected while it is used."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from nerite.cli.command import ProgressBar, agreed, is_interactive
from nerite.core.errors import InvalidArgument, NotFound, NotInstalled
from nerite.core.transfer import DownloadProgress, readable_size
from nerite.sources.hub_download import DownloadPlan, FetchWatcher, HubFetcher
from nerite.sources.name import HubName, MlflowName, ModelName, StoreName

_ASKED: Final = 10_000_000_000
"""Bytes from which the user is asked, if there is one."""


class FetchedModel(NamedTuple):
    """A model on this machine."""

    path: Path
    """File or directory that a trained model consists of."""
    name: str
    """Suggested name of the model; empty for that of the files."""
    origin: str
    """Where exactly it is from: with the commit, where there is one."""
    aliases: tuple[str, ...] = ()
    """Further names that clients may know it by."""


class TerminalWatcher(FetchWatcher):
    """Shows on stderr what is downloaded: a bar on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, *, consent: bool = False) -> None:
        """``consent``: the user has agreed to any download."""
        self._consent = consent
        self._bar = ProgressBar()

    def told(self, text: str) -> None:
        """Print a line."""
        self._bar.clear()
        print(f"nerite: {text}", file=sys.stderr, flush=True)

    def agrees(self, plan: DownloadPlan) -> bool:
        """Say what is downloaded; ask for consent if it is large and somebody is there."""
        size, licence = readable_size(plan.missing), plan.licence or "not stated"
        count = len(plan.choice.files)
        self.told(f"{plan.name}: {count} file{'s' * (count != 1)}, {size} to download; licence: {licence}")
        if self._consent or plan.missing < _ASKED or not is_interactive():
            return True
        return agreed(f"Download {size}?", otherwise=True)

    def progress(self, progress: DownloadProgress, total: int) -> None:
        """Draw the bar, or print a line if one is due."""
        now = time.monotonic()
        if not self._bar.shown:
            if line := progress.line(now):
                self.told(line)
        elif total:
            remark = progress.remark(now)
            self._bar.part("downloading", progress.done / total, f"of {readable_size(total)}, {remark}".rstrip(", "))

    def ended(self) -> None:
        """Clear the bar."""
        self._bar.clear()


class ModelFetcher:
    """Fetches models. A context manager: leaving it releases them, and removes what was fetched for this use alone."""

    def __init__(
        self,
        environment: Mapping[str, str],
        folder: Path,
        watcher: FetchWatcher,
        *,
        offline: bool = False,
        trusted: bool = False,
    ) -> None:
        """``folder`` is for files that no cache keeps."""
        self._environment = environment
        self._folder = folder
        self._offline = offline
        self._hub = HubFetcher(environment, watcher, offline=offline, trusted=trusted)
        self._stack = ExitStack()

    def __enter__(self) -> ModelFetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def fetch(self, name: ModelName) -> FetchedModel:
        """Return a model. Raises ``NeriteError``."""
        match name:
            case HubName():
                return self._from_hub(name)
            case MlflowName():
                return self._from_mlflow(name)
            case StoreName():
                return self._from_store(name)

    def _from_hub(self, name: HubName) -> FetchedModel:
        # Before the fetch: what is being removed is not found to be here.
        self._stack.enter_context(self._hub.cache.using(name.repository))
        found = self._hub.fetch(name)
        suggested = PurePosixPath(name.file).stem if name.file else name.model
        return FetchedModel(found.path, suggested, str(found.name), (name.repository,))

    def _from_mlflow(self, name: MlflowName) -> FetchedModel:
        path, uri = fetch_logged_model(name.uri, self._folder)
        words = [word for word in uri.partition(":")[2].split("/") if word and not word.isdecimal()]
        return FetchedModel(path, words[0] if uri.startswith("models:") and words else path.name, f"mlflow:{uri}")

    def _from_store(self, name: StoreName) -> FetchedModel:
        from nerite.repository.remote import repository_at

        if self._offline:
            raise NotFound(f"'{name.location}' is in an object store, and downloads are off (--offline).")
        parent, _, last = name.location.rstrip("/").rpartition("/")
        try:
            repository = repository_at(parent, self._environment)
        except InvalidArgument:
            raise InvalidArgument(
                f"'{name.location}' is a whole bucket, not a model.\n"
                "    Name the file or directory of a model in it; serve a repository with: nerite serve"
            ) from None
        self._stack.callback(repository.close)
        folder = repository.fetch(last) or repository.fetch_object(last)
        if folder is None:
            raise NotFound(f"there is no object '{name.location}', and none below it.\n    Check the path.")
        self._stack.callback(repository.release, folder)
        file = folder / last
        return FetchedModel(file if file.is_file() else folder, PurePosixPath(last).stem, name.location)


def fetch_logged_model(uri: str, folder: Path | None = None) -> tuple[Path, str]:
    """Return a model that MLflow has logged, and its URI with the version that an alias stands for.

    ``folder`` is where it is downloaded to, if it is elsewhere. Raises ``NeriteError``.
    """
    try:
        import mlflow.artifacts
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ModuleNotFoundError:
        raise NotInstalled(
            "models of MLflow need the package 'mlflow-skinny'. Install it with: pip install 'nerite[mlflow]'"
        ) from None
    try:
        registered, at, alias = uri.removeprefix("models:/").partition("@")
        if uri.startswith("models:/") and at:
            uri = f"models:/{registered}/{MlflowClient().get_model_version_by_alias(registered, alias).version}"
        into = None if folder is None else tempfile.mkdtemp(dir=folder)
        return Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=into)), uri
    except MlflowException as error:
        raise NotFound(
            f"MLflow has no model '{uri}': {str(error).partition(chr(10))[0]}\n"
            "    Set MLFLOW_TRACKING_URI to the server that has it."
        ) from None
    except OSError as error:
        raise NotFound(f"the model '{uri}' cannot be read: {error.strerror or error}") from None
