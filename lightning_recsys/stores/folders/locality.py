"""Whether a server's folder is this machine's own, so that its files may be mapped here.

That a folder can be read says little: a file system of a network shows the same files to many machines, and a copied
folder has the same content. Two kernels that map one file do not see each other's writes in time, or at all. One kernel
does, so what counts is the kernel and the file: the boot id, the device and the inode. Containers and network
namespaces of one machine share its kernel, and map the same memory: they count as one machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MOUNTS = Path("/proc/self/mountinfo")
LOCAL_FILE_SYSTEMS = frozenset(
    {"tmpfs", "ramfs", "hugetlbfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "jfs", "overlay"}
)
"""File systems whose files are one kernel's alone.

A list of what is allowed, not of what is known to be a network's (nfs, cifs, lustre, ceph, gpfs, fuse.sshfs, 9p, ...):
one that is missing here costs speed, one that were missing there would cost updates.
"""


def place_of(folder: Path) -> dict[str, Any]:
    """Where a folder is that this process can reach: kernel, device and inode; plain, for a message.

    Raises:
        OSError: this process cannot reach the folder.
    """
    found = folder.stat()
    return {"boot": boot_id(), "device": found.st_dev, "inode": found.st_ino}


def boot_id() -> str:
    """The id of this kernel since it started; empty where there is none to read."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def file_system(folder: Path) -> str:
    """The type of the file system that a folder is on, in the kernel's words; empty where it cannot be known."""
    try:
        device, path = os.stat(folder).st_dev, os.path.realpath(folder)
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    best, found = (False, -1), ""
    for line in lines:
        mount, _, described = line.partition(" - ")
        _, _, number, _, point, *_ = mount.split(" ")
        point = point.encode("ascii", "backslashreplace").decode("unicode_escape").rstrip("/")
        if path == point or path.startswith(f"{point}/"):
            # A mount may lie over others; the subvolumes of some file systems have devices that no line names.
            fit = (number == f"{os.major(device)}:{os.minor(device)}", len(point))
            if fit >= best:
                best, found = fit, described.split(" ")[0]
    return found


def why_not_local(folder: Path, place: dict[str, Any]) -> str | None:
    """Why the files of a server's folder cannot be mapped here; ``None`` if they can.

    Args:
        folder: As the server names it.
        place: Where the server sees it, as :func:`place_of` says it.
    """
    try:
        here = place_of(folder)
    except OSError:
        return f"{folder} is not on this machine"
    if not here["boot"] or here["boot"] != place.get("boot"):
        return f"the server runs on another machine, where {folder} is"
    if here != place:
        return f"{folder} is another folder here than at the server"
    kind = file_system(folder)
    if kind not in LOCAL_FILE_SYSTEMS:
        return f"{folder} is on a file system ({kind or 'unknown'}) that may be other machines' as well"
    return None
