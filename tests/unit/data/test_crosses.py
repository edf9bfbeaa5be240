"""Pairs of columns that tell more together, and numbers that tell more in bins, are named in a guessed schema."""

import numpy as np
import pandas as pd
import pytest

from lightning_recsys.data import TabularDataModule
from lightning_recsys.data.guesses.guessing import guess_schema
from lightning_recsys.data.tables.schema import Schema


def table(rng, num_rows, effect, *, copies=0.0, num_columns=5):
    """Rows of words, the label of which has odds that the first two columns give together."""
    codes = rng.integers(0, 12, (num_rows, num_columns))
    copied = rng.random(num_rows) < copies
    codes[copied, 1] = codes[copied, 0]
    alone = rng.normal(0, 0.7, (num_columns, 12))
    odds = -1 + effect[codes[:, 0], codes[:, 1]] + sum(alone[i][codes[:, i]] for i in range(num_columns))
    rows = pd.DataFrame({f"c{i}": [f"v{code}" for code in codes[:, i]] for i in range(num_columns)})
    rows["clicked"] = (rng.random(num_rows) < 1 / (1 + np.exp(-odds))).astype(int)
    return rows


def guessed(path, rows):
    rows.to_csv(path, index=False)
    return guess_schema(path).to_yaml()


def named(text):
    return [line.strip() for line in text.splitlines() if "cross:" in line]


def test_two_columns_when_they_tell_more_together_then_a_commented_line_names_their_cross(tmp_path):
    rng = np.random.default_rng(0)
    text = guessed(tmp_path / "rows.csv", table(rng, 20_000, rng.normal(0, 1, (12, 12))))
    (line,) = named(text)
    assert line.startswith("# c0_c1: {cross: [c0, c1], min_count: 10}  # held-out log loss with it .")
    with_it, without = (float(word.strip(",")) for word in line.split() if word.startswith("."))
    assert with_it < without - 0.02

    (tmp_path / "as_it_stands.yaml").write_text(text)
    assert "c0_c1" not in Schema.from_yaml(tmp_path / "as_it_stands.yaml").categorical
    (tmp_path / "uncommented.yaml").write_text(text.replace("# c0_c1", "c0_c1"))
    assert Schema.from_yaml(tmp_path / "uncommented.yaml").categorical["c0_c1"].cross == ("c0", "c1")


def test_crosses_when_a_number_is_a_category_too_then_are_of_its_ids_and_have_a_name_of_their_own(tmp_path):
    rng = np.random.default_rng(1)
    rows = table(rng, 20_000, rng.normal(0, 1, (12, 12)))
    rows["c0"] = 3 * rows["c0"].str[1:].astype(int) + 1  # whole numbers, whose place says nothing
    rows = rows.rename(columns={"c1": "c.1"}).assign(c0_c_1=[f"w{i % 7}" for i in range(len(rows))])
    (line,) = named(guessed(tmp_path / "rows.csv", rows))
    assert line.startswith("# c0_c_1_2: {cross: [c0, c.1], min_count: 10}")


@pytest.mark.parametrize("copies", [0.0, 0.8])
def test_columns_when_their_effects_add_up_then_no_cross_is_named(tmp_path, copies):
    """Also where one column is mostly a copy of another, so that either alone tells what both do."""
    for seed in range(10):
        rows = table(np.random.default_rng(seed), 6_000, np.zeros((12, 12)), copies=copies)
        assert named(guessed(tmp_path / "rows.csv", rows)) == []


def test_crosses_when_pairs_hardly_repeat_then_are_not_named(tmp_path):
    rng = np.random.default_rng(2)
    rows = table(rng, 3_000, np.zeros((12, 12)), num_columns=2)
    users, items = (rng.integers(0, 500, 3_000) for _ in range(2))
    rows["c0"], rows["c1"] = [f"u{user}" for user in users], [f"i{item}" for item in items]
    assert named(guessed(tmp_path / "rows.csv", rows)) == []


def test_crosses_when_many_are_worth_it_then_three_are_named_with_the_best_first(tmp_path):
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 6, (20_000, 6))
    odds = sum(
        size * rng.normal(0, 1, (6, 6))[codes[:, i], codes[:, j]]
        for size, i, j in [(0.5, 0, 1), (1.5, 2, 3), (0.9, 4, 5), (0.7, 1, 2)]
    )
    rows = pd.DataFrame({f"c{i}": [f"v{code}" for code in codes[:, i]] for i in range(6)})
    rows["clicked"] = (rng.random(len(rows)) < 1 / (1 + np.exp(-odds))).astype(int)
    lines = named(guessed(tmp_path / "rows.csv", rows))
    assert [line.split(":")[0] for line in lines[:2]] == ["# c2_c3", "# c4_c5"]
    assert len(lines) == 3


def test_numbers_when_a_straight_line_does_not_fit_then_commented_lines_name_their_bins(tmp_path):
    """In a table without categories, too, where the lines begin with the key."""
    rng = np.random.default_rng(4)
    age, price = rng.uniform(15, 90, 20_000), rng.lognormal(3, 1, 20_000)
    odds = 2 - np.abs(age - 50) / 8 + np.log(price) - 3
    rows = pd.DataFrame({"age": age.round(2), "price": price.round(2)})
    rows["clicked"] = (rng.random(len(rows)) < 1 / (1 + np.exp(-odds))).astype(int)
    text = guessed(tmp_path / "rows.csv", rows)
    key, line = (line for line in text.splitlines() if line.startswith("#") and "Guessed" not in line)
    assert key == "# categorical:"
    assert line.startswith("#   age_bins: {column: age, edges: [")
    assert "# held-out log loss in bins ." in line

    text = text.replace("# categorical", "categorical").replace("#   age_bins", "  age_bins")
    (tmp_path / "uncommented.yaml").write_text(text)
    schema = Schema.from_yaml(tmp_path / "uncommented.yaml")
    edges = schema.categorical["age_bins"].edges
    assert edges == pytest.approx(np.quantile(age, np.arange(1, 16) / 16), abs=0.2)
    data = TabularDataModule(schema=schema, cache=tmp_path / "cache")
    data.setup()
    assert data.fields == {"age_bins": 16 + 2}


@pytest.mark.parametrize("slope", [0, 1])
def test_numbers_when_a_straight_line_fits_then_have_no_bins(tmp_path, slope):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        number = rng.normal(0, 1, 10_000)
        rows = pd.DataFrame({"x": number.round(4), "shop": [f"s{i}" for i in rng.integers(0, 9, 10_000)]})
        rows["clicked"] = (rng.random(len(rows)) < 1 / (1 + np.exp(-slope * number))).astype(int)
        assert "edges" not in guessed(tmp_path / "rows.csv", rows)
