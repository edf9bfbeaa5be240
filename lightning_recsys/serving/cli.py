"""``lightning-recsys versions``: what is published in a folder, going back to a version, and releasing it."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime

from lightning_recsys.serving.files import VersionFolder
from lightning_recsys.serving.publishing.retention import list_versions, release, roll_back


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="lightning-recsys versions",
        description=(
            "List the versions of a model that are published in a folder, or let an earlier one count, while a run"
            " publishes there or not."
        ),
    )
    parser.add_argument("url", metavar="URL", help="the folder, or a URL such as s3://bucket/model")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--roll-back",
        metavar="N",
        type=int,
        help="compare version N with its digests, and let it count until --release",
    )
    what.add_argument("--release", action="store_true", help="let the latest version count again after --roll-back")
    given = parser.parse_args(arguments)
    try:
        if given.roll_back is not None:
            roll_back(given.url, given.roll_back)
        if given.release and release(given.url) is None:
            print(f"{parser.prog}: no version of {given.url} is held, so the latest one counts.", file=sys.stderr)
        held, (current, manifests) = VersionFolder(given.url).held(), list_versions(given.url)
    except (OSError, ValueError, ImportError) as error:  # fsspec lacks a package for some URLs
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    if not manifests:
        print(f"{parser.prog}: nothing was published in {given.url}", file=sys.stderr)
        return 1
    for manifest in manifests:
        created = datetime.fromtimestamp(manifest.created, UTC).strftime("%Y-%m-%d %H:%M:%S")
        size = sum(entry.size for entry in manifest.files.values())
        mark = "*" if current is not None and current.version == manifest.version else " "
        step = manifest.position.get("global_step", "-")
        print(
            f"{mark} {manifest.version:>6}  {manifest.kind:<9}  {created} UTC  step {step:>8}"
            f"  {size:>14,} bytes  run {manifest.run}"
        )
    if held is not None:
        print(f"Version {held.version} counts until it is released: {parser.prog} {given.url} --release")
    return 0
