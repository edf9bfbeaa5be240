"""Names of splits, and checks of what data modules are given. Who prepares rows has them without Lightning."""

from typing import Literal

Split = Literal["train", "validation", "test", "predict"]


def check_option(name: str, value: object, allowed: str, *, ok: bool) -> None:
    """Raise ``ValueError`` that says what an option must be, unless it is."""
    if not ok:
        raise ValueError(f"{name} must be {allowed}, got {value!r}.")
