"""Generations of a group whose members may die: how those that are left agree on what the next one begins with.

Members average in rounds, each of which needs all of them. So none is more than one round ahead of another: who has
finished a round has had something of every member in it, and these had finished the round before. A member that dies
cuts the round off that is under way. Some of the others may have its mean already, and some have not. All of them leave
the generation then, and report how many rounds they have folded in; one of them decides for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """The way in which a member left a generation.

    Args:
        rank: Rank of the member.
        folded: Rounds that it has folded in; ``None`` for one that was in no generation yet.
        has_stopped: Its last round was the one in which all wanted to stop. Otherwise the group has failed, or is to
            have other members.
    """

    rank: int
    folded: int | None
    has_stopped: bool = False


@dataclass(frozen=True)
class Decision:
    """The next step of all members, the same for all of them.

    Args:
        members: Those of the next generation, in rising order.
        folded: Rounds that all of them have folded in once it begins.
        source: The member that tells the others what they lack.
        stops: Nobody makes a round for now: one member has seen that all wanted to.
        is_whole: All of them have seen it, so the group they have is good for later.
        lags: Some members lack the mean of the last round, which the source has.
        joins: Some members are new, and lack what the algorithm remembers.
        begins: All of them are, as nobody else is left: the algorithm begins at what the source has.
    """

    members: tuple[int, ...]
    folded: int
    source: int
    stops: bool
    is_whole: bool
    lags: bool
    joins: bool
    begins: bool = False


def decide(reports: Sequence[Report]) -> Decision:
    """The decision that follows from the reports of all members that live.

    A round that any of them has folded in counts, and those that have not fold it in, too. A round that none of them
    has folded in is forgotten: they make it again. Where one has seen that all want to stop the others wanted it, too.

    Raises:
        ValueError: a member is more than one round behind.

    >>> decide([Report(0, folded=4), Report(2, folded=5)])
    Decision(members=(0, 2), folded=5, source=2, stops=False, is_whole=False, lags=True, joins=False, begins=False)
    """
    # Those that have been in no generation join: they say nothing of rounds.
    told = {report.rank: report.folded for report in reports if report.folded is not None}
    if not told:
        members = tuple(sorted(report.rank for report in reports))
        plain = {"stops": False, "is_whole": False, "lags": False, "joins": True, "begins": True}
        return Decision(members, folded=0, source=members[0], **plain)
    folded = max(told.values())
    if min(told.values()) < folded - 1:
        raise ValueError(f"members have folded in {told} rounds, and none can be more than one round behind another.")
    return Decision(
        members=tuple(sorted(report.rank for report in reports)),
        folded=folded,
        source=min(rank for rank, count in told.items() if count == folded),
        stops=any(report.has_stopped for report in reports),
        is_whole=all(report.has_stopped for report in reports),
        lags=min(told.values()) < folded,
        joins=len(told) < len(reports),
    )
