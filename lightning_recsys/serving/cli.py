"""``lightning-recsys versions``: what is published in a folder, and going back to an earlier version."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime

from lightning_recsys.serving.publishing.retention import list_versions, roll_back


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="lightning-recsys versions",
        description="List the versions of a model that are published in a folder, or let an earlier one count again.",
    )
    parser.add_argument("url", metavar="URL", help="the folder, or a URL such as s3://bucket/model")
    parser.add_argument(
        "--roll-back", metavar="N", type=int, help="compare version N with its digests, and let it count from now on"
    )
    given = parser.parse_args(arguments)
    try:
        if given.roll_back is not None:
            roll_back(given.url, given.roll_back)
        current, manifests = list_versions(given.url)
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
    return 0
