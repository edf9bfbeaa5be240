"""The name of a run, by which a server that outlives runs knows one from another."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from lightning_recsys.stores.folders.locality import boot_id

JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
NETWORK = Path("/proc/self/ns/net")


def run_id(*, launched_by_others: bool, job: str | None = None) -> str:
    """An id that no other run has, drawn or found by rank 0.

    Args:
        launched_by_others: Whether the ranks are not our launcher's.
        job: The name of the job at the engine that started the ranks. Its first rank may be on another machine, and the
            ranks meet at another port, when they are started again.

    Where ``torchrun`` or SLURM starts the ranks, ranks that are started again belong to the same run: its id is made of
    what the launcher told them, and of this machine, whose port 29500 is another run's on the next machine.
    """
    if not launched_by_others:
        return secrets.token_hex(16)
    if job is not None:
        return hashlib.sha256(job.encode()).hexdigest()[:32]
    parts = [boot_id(), socket.gethostname(), *(os.environ.get(name, "") for name in JOB)]
    with suppress(OSError):  # not on Linux
        parts.append(str(NETWORK.stat().st_ino))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def run_in_words() -> str:
    """The run as its user knows it."""
    return f"process {os.getpid()} on {socket.gethostname()[:64]}, since {datetime.now():%Y-%m-%d %H:%M:%S}"
