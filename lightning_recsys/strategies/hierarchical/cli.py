"""``lightning-recsys groups``: groups of Hierarchical Training on this machine, drained for maintenance."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path

from lightning_recsys.launchers.folders import PREFIX, remove_abandoned
from lightning_recsys.launchers.sidecars import SHARED_MEMORY
from lightning_recsys.parameter_server.waiting import turns
from lightning_recsys.strategies.hierarchical.draining import WANTED, GroupState

NONE_HERE = "no groups of Hierarchical Training run on this machine"

Group = dict[Path, GroupState]
"""The folders of a group's servers, with what each tells."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="lightning-recsys groups",
        description="List the groups of Hierarchical Training whose servers run on this machine; drain one for"
        " maintenance, while the others train, and let it come back with the centre's weights.",
    )
    parser.add_argument("command", nargs="?", choices=["list", "drain", "rejoin"], default="list")
    parser.add_argument("group", nargs="?", type=int, help="the group's number, from 0")
    parser.add_argument("--run", help="the run, as the list names it, where there are several")
    parser.add_argument("--store-folder", type=Path, default=SHARED_MEMORY, help="strategy.store_folder of the run")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for the group")
    given = parser.parse_args(arguments)
    runs = find_runs(given.store_folder)
    try:
        if given.command == "list":
            sys.stdout.write(_listed(runs))
            return 0
        run = _choose(runs, given.run)
        groups = _wait_for_begin(given.store_folder, run, given.group, timeout=given.timeout)
        act = drain if given.command == "drain" else rejoin
        act(groups, given.group, timeout=given.timeout)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 1
    sys.stdout.write(f"group {given.group} {'is drained' if given.command == 'drain' else 'is back'}\n")
    return 0


def find_runs(parent: Path) -> dict[str, dict[int, Group]]:
    """The groups of each run of this user's whose servers keep their files below a folder; what dead runs left goes."""
    remove_abandoned(parent)
    found: dict[str, dict[int, Group]] = {}
    for run in sorted(parent.glob(f"{PREFIX}-*")):
        with suppress(FileNotFoundError):  # it ends just now
            for folder in sorted(x for x in run.glob("group-*") if x.is_dir() and x.lstat().st_uid == os.getuid()):
                if (state := GroupState.read(folder)) is not None:
                    found.setdefault(run.name, {}).setdefault(state.group, {})[folder] = state
    return found


def drain(groups: dict[int, Group], number: int, *, timeout: float) -> None:
    """Have a group train nothing, and return when it does not: its nets wait, and its servers make no rounds.

    Args:
        groups: The groups of the run, by number.
        number: Number of the group to drain.
        timeout: Seconds to wait until the group trains nothing.

    Raises:
        ValueError: the others cannot do without it, as far as this machine's servers tell.
        TimeoutError: it does not come to rest; it will when its nets come to it.
    """
    states = groups[number].values()
    if not all(state.can_drain for state in states):
        raise ValueError(
            "a group can be drained where there are others and they have a centre (strategy.algorithm=easgd): this one"
            " is alone, or all groups take part in each round."
        )
    num_groups = next(iter(states)).num_groups
    others = [x for x, group in groups.items() if x != number and not any(y.drained for y in group.values())]
    if len(groups) == num_groups and not others:
        raise ValueError(f"group {number} is the only one that trains: let another one come back first.")
    if number == 0:
        sys.stderr.write("group 0 has the first rank: where that publishes the model, no versions come meanwhile\n")
    for folder in groups[number]:
        (folder / WANTED).touch(mode=0o600)
    _wait(groups[number], drained=True, timeout=timeout)


def rejoin(groups: dict[int, Group], number: int, *, timeout: float) -> None:
    """Let a drained group come back with the centre's weights; see :func:`drain`."""
    for folder in groups[number]:
        (folder / WANTED).unlink(missing_ok=True)
    _wait(groups[number], drained=False, timeout=timeout)


def _wait(group: Group, *, drained: bool, timeout: float) -> None:
    for _ in turns(timeout):
        states = [GroupState.read(folder) for folder in group]
        if all(state is not None and (state.is_idle if drained else not state.drained) for state in states):
            return
        if any(state is None for state in states):
            raise ValueError("the run has ended.")
    raise TimeoutError(
        f"the group's nets did not {'come to rest' if drained else 'come back'} within {timeout:.0f} s. They will when"
        " they next look, which they do between batches; lightning-recsys groups tells."
    )


def _choose(runs: dict[str, dict[int, Group]], name: str | None) -> str:
    if name is not None and name in runs:
        return name
    if not runs:
        raise ValueError(NONE_HERE)
    if name is not None or len(runs) != 1:
        raise ValueError(f"name one of the runs of this machine with --run: {sorted(runs)}.")
    return next(iter(runs))


def _wait_for_begin(parent: Path, run: str, number: int, *, timeout: float) -> dict[int, Group]:
    """The groups of a run, once the given one is among them: its servers tell nothing before its first batch."""
    for _ in turns(timeout):
        groups = find_runs(parent).get(run, {})
        if number in groups:
            return groups
        states = [state for group in groups.values() for state in group.values()]
        if not states:
            raise ValueError("the run has ended.")
        if number not in range(states[0].num_groups):
            raise ValueError(f"name one of the groups {sorted(groups)}, got {number}.")
    raise TimeoutError(
        f"group {number} has not begun here within {timeout:.0f} s, or its servers run on another machine."
    )


def _listed(runs: dict[str, dict[int, Group]]) -> str:
    lines = [
        f"{run}  group {number}  {'drained' if any(x.drained for x in group.values()) else 'trains'}  "
        f"{max(x.waiting for x in group.values())} of {max(x.nets for x in group.values())} nets wait\n"
        for run, groups in runs.items()
        for number, group in sorted(groups.items())
    ]
    return "".join(lines) or f"{NONE_HERE}\n"
