"""Rules that make labels, against plain Python."""

from __future__ import annotations

import math
import operator

import pyarrow as pa
import pytest

from lightning_recsys.data.tables.label import LabelRule

NUMBERS = ["3", "4", "4.0", "4.5", "-1", "1e1"]


@pytest.mark.parametrize("sign", [">=", ">", "<=", "<", "==", "!="])
def test_rule_when_it_compares_with_a_number_then_does_what_python_does(sign):
    compare = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt, "==": operator.eq}.get(
        sign, operator.ne
    )
    labels = LabelRule(f"{sign} 4").apply(pa.array(NUMBERS)).tolist()
    assert labels == [float(compare(float(number), 4)) for number in NUMBERS]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ('== ">50K"', [1, 0, 0]),
        ("== '<=50K'", [0, 1, 0]),
        ('!= ">50K"', [0, 1, 1]),
        ("== yes", [0, 0, 1]),
        ('in [">50K", yes]', [1, 0, 1]),
        ('not in [">50K", yes]', [0, 1, 0]),
        ("in [yes, 4]", [0, 0, 1]),
    ],
)
def test_rule_when_it_compares_words_then_does_so_letter_by_letter(rule, expected):
    assert LabelRule(rule).apply(pa.array([">50K", "<=50K", "yes"])).tolist() == expected


def test_rule_when_it_lists_numbers_then_compares_them_as_numbers():
    assert LabelRule("in [4, 5]").apply(pa.array(["4.0", "5", "3"])).tolist() == [1, 1, 0]
    assert LabelRule("not in [4, 5]").apply(pa.array(["4.0", "5", "3"])).tolist() == [0, 0, 1]


@pytest.mark.parametrize("rule", [">= 4", "== 4", "!= 4", "in [4]", None])
def test_rule_when_a_number_is_wanted_and_there_is_none_then_gives_nan(rule):
    labels = LabelRule(rule).apply(pa.array(["maybe", "1"])).tolist()
    assert math.isnan(labels[0])
    assert not math.isnan(labels[1])


def test_no_rule_when_labels_are_binary_then_takes_them_and_nothing_else():
    labels = LabelRule().apply(pa.array(["0", "1", "0.0", "1.0", "true", "False", "2", "-1", "0.5"])).tolist()
    assert labels[:6] == [0, 1, 0, 1, 1, 0]
    assert all(map(math.isnan, labels[6:]))


@pytest.mark.parametrize(
    "rule", ["", "4", ">= x", ">= [4]", "in 4", "in []", "== [4]", "== {a: b}", "== 'open", "=> 4"]
)
def test_rule_when_it_cannot_be_read_then_lists_what_can(rule):
    with pytest.raises(ValueError, match=r"schema\.label\.rule .* cannot be read\. Rules are: >= 4, .*in \[4, 5\]"):
        LabelRule(rule)
