"""Which versions of a folder stay, and going back to one of them until it is released."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lightning_recsys.errors import PublishedVersionError
from lightning_recsys.serving.files import VersionFolder
from lightning_recsys.serving.manifest import Link, Manifest
from lightning_recsys.serving.publishing import claims
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
    """

    def __init__(self, folder: VersionFolder, run: str, *, keep: int, keep_runs: int | None) -> None:
        self._folder, self._run, self._keep, self._keep_runs = folder, run, keep, keep_runs
        self._known: dict[int, Manifest] = {}  # a version's manifest never changes

    def clear_old(self) -> None:
        """Remove what is too old; a version of which nothing can be read just now stays, and so may be all others.

        What cannot be done just now is a warning: the version that was published before this counts all the same.

        The version that is held stays with what it builds on, whichever run it is of. On this machine nobody can go
        back to a version while it is removed; elsewhere :func:`roll_back` looks again after a while.
        """
        try:
            with self._folder.keeping_still():
                self._clear_old(self._folder.held())
        except (OSError, PublishedVersionError) as error:  # a damaged hold, a network that fails: the next time, then
            log.warning("Versions that are too old stay for now: %s", error)

    def _clear_old(self, held: Link | None) -> None:
        manifests = self._manifests()
        own = [version for version, manifest in manifests.items() if manifest.run == self._run]
        kept = sorted(own)[-self._keep :] + ([] if held is None else [held.version])
        wanted = self._with_bases(kept, manifests)
        if wanted is None:  # a network that fails for a moment must not cost a base
            return
        self._remove((version for version in own if version not in wanted), held)
        if self._keep_runs is not None:
            latest: dict[str, int] = {}  # the latest version of each run; this run has the latest of all
            for version, manifest in manifests.items():
                latest[manifest.run] = max(version, latest.get(manifest.run, 0))
            for run in sorted(latest, key=lambda run: latest[run], reverse=True)[self._keep_runs :]:
                gone = [version for version, x in manifests.items() if x.run == run and version not in wanted]
                if not gone:
                    continue
                log.info("Removing versions %d to %d of run %s: keep_runs=%d.", gone[0], gone[-1], run, self._keep_runs)
                self._remove(gone, held)

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

    def _remove(self, versions: Iterable[int], held: Link | None) -> None:
        for version in sorted(versions, reverse=True):  # no version outlives what it builds on
            if not self._folder.is_local and self._folder.held() != held:  # somebody goes back just now
                return
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
    return folder.counting(), found


def roll_back(url: str | Path, version: int) -> Manifest:
    """Hold a version: it counts until :func:`release`, after all of its files were compared with their digests.

    Servers follow. A run that publishes there goes on publishing; its versions count once this one is released.
    All that changes is one file, ``held.json``, in one step: a kill at any moment leaves what counted before, or this.

    Args:
        url: A folder, or a URL that fsspec knows.
        version: Number of the version to go back to.

    Raises:
        FileNotFoundError: nothing was published there.
        PublishedVersionError: the version is not there, or is damaged; what counted before counts on.
    """
    folder = VersionFolder(url)
    if not folder.versions():  # a lock would make the folder
        raise FileNotFoundError(f"{url}: nothing was published there, so there is no version {version}.")
    with folder.keeping_still():
        model, before = ModelReader(url, version=version).model, folder.held()
        folder.hold(model.link)
        if not folder.is_local:
            # Object stores lock nothing: a publisher that has not seen the hold may be about to remove the version. It
            # looks right before it removes, so after a while either it has seen the hold, or the version is gone.
            time.sleep(claims.SETTLE_SECONDS)
            try:
                folder.chain(model.link)
            except PublishedVersionError:
                folder.hold(before)
                raise
    return model.manifest


def release(url: str | Path) -> Link | None:
    """Let the latest version count again where :func:`roll_back` held one. Servers follow.

    Args:
        url: A folder, or a URL that fsspec knows.

    Returns:
        The version that was held; ``None`` where none was.

    Raises:
        PublishedVersionError: ``held.json`` is damaged; remove it by hand.
    """
    folder = VersionFolder(url)
    if (held := folder.held()) is None:
        return None
    with folder.keeping_still():
        folder.hold(None)
    return held
