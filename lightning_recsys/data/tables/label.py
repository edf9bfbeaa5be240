"""Rules that turn a column into clicks."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml  # type: ignore[import-untyped]
from numpy.typing import NDArray

from lightning_recsys.data.tables.columns import NUMBER, parse_numbers

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_RULE = re.compile(r"(>=|<=|==|!=|>|<|not in\b|in\b)\s*(.+)", re.DOTALL)


@dataclass(frozen=True)
class LabelRule:
    """The rule that makes a row positive: ``>= 4``, ``== ">50K"``, ``!= none``, ``in [5, 10]``, ``not in [spam, bot]``.

    Numbers are compared as numbers, anything else letter by letter. Without a rule, labels must be 0 and 1, or false
    and true.

    Raises:
        ValueError: the rule cannot be read.

    >>> LabelRule(">= 4").apply(pa.array(["5", "3.5", "?"])).tolist()
    [1.0, 0.0, nan]
    >>> LabelRule('in [">50K", "much"]').apply(pa.array([">50K", "<=50K"])).tolist()
    [1.0, 0.0]
    """

    text: str | None = None

    def __post_init__(self) -> None:
        self._parse()

    @property
    def expected(self) -> str:
        """The values that a label must have for the rule to fit."""
        if self.text is None:
            return 'must be 0 or 1, or schema.label needs a rule, such as rule: ">= 4"'
        return f"must be a number, to be compared by the rule {self.text!r}"

    @property
    def compares_numbers(self) -> bool:
        """Whether the rule is about numbers, as it is where there is none, and not about words."""
        return not isinstance(self._parse()[1][0], str)

    def apply(self, values: pa.StringArray) -> NDArray[np.float32]:
        """Labels of the given strings; NaN for those that the rule does not fit. No string may be missing."""
        sign, operands = self._parse()
        if sign in _COMPARISONS:
            numbers, _ = parse_numbers(values)
            positive, fits = _COMPARISONS[sign](numbers, operands[0]), ~np.isnan(numbers)
        elif isinstance(operands[0], str):
            positive, fits = _is_in(values, operands), np.ones(len(values), dtype=bool)
        else:
            numbers, _ = parse_numbers(values)
            positive, fits = np.isin(numbers, operands), ~np.isnan(numbers)
        if sign is None:
            truth, untruth = _is_in(values, ["true", "True", "TRUE"]), _is_in(values, ["false", "False", "FALSE"])
            positive, fits = positive | truth, positive | truth | untruth | (numbers == 0)
        labels: NDArray[np.float32] = np.where(fits, positive != (sign in ("!=", "not in")), np.nan).astype(np.float32)
        return labels

    def _parse(self) -> tuple[str | None, list[float] | list[str]]:
        if self.text is None:
            return None, [1.0]
        match = _RULE.fullmatch(self.text.strip())
        words = _words(match[2]) if match else []
        numbers = [float(word) for word in words if re.fullmatch(NUMBER, word)]
        numeric = len(numbers) == len(words)
        if (
            match is None
            or not words
            or (match[1] in _COMPARISONS and not numeric)
            or match[1].endswith("in") != match[2].startswith("[")
        ):
            raise ValueError(
                f"schema.label.rule {self.text!r} cannot be read. Rules are: >= 4, > 4, <= 4, < 4 with a number; "
                '== ">50K", != ">50K" with a number or a quoted word; in [4, 5], not in [4, 5] with a list.'
            )
        return match[1], numbers if numeric else words


def _words(text: str) -> list[str]:
    """A word or a list of words, quoted where they need it; nothing if it is neither."""
    try:
        loaded = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 - makes strings, lists and dicts only
    except yaml.YAMLError:
        return []
    words = loaded if isinstance(loaded, list) else [loaded]
    return words if all(isinstance(word, str) for word in words) else []


def _is_in(values: pa.StringArray, words: Sequence[float | str]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = pc.is_in(values, value_set=pa.array(words)).to_numpy(zero_copy_only=False)
    return found
