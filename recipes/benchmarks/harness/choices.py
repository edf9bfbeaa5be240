"""What a suite can be asked for, judged before it measures anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def check_choices(where: str, given: Sequence[str], allowed: Iterable[str]) -> None:
    """Refuse names that there are not.

    Args:
        where: Their place in the configuration.
        given: The names.
        allowed: All that there are.

    Raises:
        ValueError: the names are no list, there are none, or one of them is not allowed.
    """
    allowed = list(allowed)
    rule = f"{where} must be some of {', '.join(allowed)}"
    if isinstance(given, str) or not given:
        raise ValueError(f"{rule}, got {given!r}. Give a list, such as '{where}=[{allowed[0]}]'")
    if unknown := [name for name in given if name not in allowed]:
        near = get_close_matches(str(unknown[0]), allowed, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{rule}, got {unknown[0]!r}.{hint}")


def check_numbers(where: str, given: Sequence[int] | int, *, least: int = 1) -> None:
    """Refuse numbers that nothing can be measured with.

    Args:
        where: Their place in the configuration.
        given: One number, or a list of at least one.
        least: That is allowed.

    Raises:
        ValueError: the list is empty, or something is no whole number or less than ``least``.
    """
    numbers = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not numbers or any(not isinstance(each, int) or each < least for each in numbers):
        what = "a list of whole numbers" if numbers is given else "a whole number"
        raise ValueError(f"{where} must be {what} of at least {least}, got {given!r}.")
