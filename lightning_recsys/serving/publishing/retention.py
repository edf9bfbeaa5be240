"""Which versions of a folder stay, and going back to one of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lightning_recsys.errors import PublishedVersionError
from lightning_recsys.serving.files import VersionFolder
from lightning_recsys.serving.manifest import Link, Manifest
from lightning_recsys.serving.reader import ModelReader

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too


def check_counts(place: str = "", **counts: int | None) -> None:
    """Refuse numbers of versions, runs or steps that would leave nothing, or are no numbers.

    Args:
        place: What the names of the numbers begin with in messages.
        counts: The numbers by name; ``None`` stands for no limit.

    Raises:
        ValueError: one of them is no whole number above 0.
    """
    for name, count in counts.items():
        if count is not None and (type(count) is not int or count < 1):
            raise ValueError(f"{place}{name} must be a whole number above 0, got {count!r}.")


class Retention:
    """Removes versions that are too old: of the run that publishes, and of runs long past where that is asked for.

    Args:
        folder: The folder of versions.
        run: Id of the run that publishes.
        keep: How many of this run's versions can be opened, the latest ones; what they build on stays as well.
        keep_runs: The versions of so many runs stay, this one included; ``None`` for all.
        gone_back_to: This version of the run stays as well, from which it went on.
    """

    def __init__(
        self, folder: VersionFolder, run: str, *, keep: int, keep_runs: int | None, gone_back_to: int | None
    ) -> None:
        self._folder, self._run, self._keep, self._keep_runs = folder, run, keep, keep_runs
        self._gone_back_to = gone_back_to
        self._known: dict[int, Manifest] = {}  # a version's manifest never changes

    def clear_old(self) -> None:
        """Remove what is too old; a version of which nothing can be read just now stays, and so may be all others."""
        manifests = self._manifests()
        own = [version for version, manifest in manifests.items() if manifest.run == self._run]
        kept = sorted(own)[-self._keep :] + [version for version in own if version == self._gone_back_to]
        wanted = self._with_bases(kept, manifests)
        if wanted is None:  # a network that fails for a moment must not cost a base
            return
        self._remove(version for version in own if version not in wanted)
        if self._keep_runs is not None:
            latest: dict[str, int] = {}  # the latest version of each run; this run has the latest of all
            for version, manifest in manifests.items():
                latest[manifest.run] = max(version, latest.get(manifest.run, 0))
            for run in sorted(latest, key=lambda run: latest[run], reverse=True)[self._keep_runs :]:
                gone = [version for version, manifest in manifests.items() if manifest.run == run]
                log.info("Removing versions %d to %d of run %s: keep_runs=%d.", gone[0], gone[-1], run, self._keep_runs)
                self._remove(gone)

    def _manifests(self) -> dict[int, Manifest]:
        versions = self._folder.versions()
        for version in versions:
            if version not in self._known:
                with suppress(PublishedVersionError):
                    self._known[version] = self._folder.find(version)[1]
        self._known = {version: self._known[version] for version in versions if version in self._known}
        return self._known

    def _with_bases(self, versions: Iterable[int], manifests: dict[int, Manifest]) -> set[int] | None:
        """These versions and what they build on; ``None`` where that is not known."""
        wanted = set[int]()
        for version in versions:
            while version not in wanted:
                if (manifest := manifests.get(version)) is None:
                    return None
                wanted.add(version)
                if manifest.is_base or manifest.previous is None:
                    break
                version = manifest.previous.version
        return wanted

    def _remove(self, versions: Iterable[int]) -> None:
        for version in sorted(versions, reverse=True):  # no version outlives what it builds on
            self._folder.remove(version)
            self._known.pop(version, None)


def list_versions(url: str | Path) -> tuple[Link | None, list[Manifest]]:
    """The version that counts, and all that a folder has, in order.

    Args:
        url: A folder, or a URL that fsspec knows.
    """
    folder, found = VersionFolder(url), []
    for version in folder.versions():
        with suppress(PublishedVersionError):  # it is being written, or removed
            found.append(folder.find(version)[1])
    return folder.current(), found


def roll_back(url: str | Path, version: int) -> Manifest:
    """Let another version count, after all of its files were compared with their digests. Servers follow.

    Versions after it stay. A run that publishes later goes on with the next number that is free.

    Args:
        url: A folder, or a URL that fsspec knows.
        version: Number of the version to go back to.

    Raises:
        FileNotFoundError: nothing was published there.
        PublishedVersionError: the version is not there, or is damaged.
        ValueError: a run publishes there just now, whose next version would count; the message names it.
    """
    folder = VersionFolder(url)
    if not folder.versions():  # a lock would make the folder
        raise FileNotFoundError(f"{url}: nothing was published there, so there is no version {version}.")
    with folder.locked(f"going back to version {version}"):
        model = ModelReader(url, version=version).model
        folder.set_current(model.link)
    return model.manifest
