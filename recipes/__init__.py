"""Not a package."""

raise ImportError(
    "recipes/ is a folder of scripts, not a package: run `python recipes/train.py --help`. What they are built from "
    "is in lightning_recsys, which you can import."
)
