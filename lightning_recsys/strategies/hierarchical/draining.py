"""Groups that are drained for maintenance: what is kept of that in the folders of their servers, for both sides."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

STATE = "group.json"  # in a group server's folder: what it tells of its group
WANTED = "drain"  # a file that is there while somebody wants the group to be drained


@dataclass(frozen=True)
class GroupState:
    """The status that a group server tells of its group.

    Args:
        group: Number of the group.
        num_groups: Number of groups of the run.
        can_drain: Whether the other groups can do without it, since there is a centre.
        drained: Whether the server makes no rounds with the others; the group comes back with the centre's weights.
        nets: Number of connected nets that have looked at the state.
        waiting: Number of those nets that wait.
    """

    group: int
    num_groups: int
    can_drain: bool
    drained: bool = False
    nets: int = 0
    waiting: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether the group is drained, and all of its nets wait."""
        return self.drained and self.waiting == self.nets > 0

    def write(self, folder: Path) -> None:
        """Tell it."""
        path = folder / f".{STATE}-{os.getpid()}"
        path.write_text(json.dumps(asdict(self)))
        path.rename(folder / STATE)

    @classmethod
    def read(cls, folder: Path) -> GroupState | None:
        """The status that the server of a folder tells; ``None`` where it is no group server with parts."""
        try:
            return cls(**json.loads((folder / STATE).read_text()))
        except FileNotFoundError:
            return None
