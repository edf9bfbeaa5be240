"""Guesses that the rows decide, on tables in the likeness of those that people have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_recsys.data import Schema, TabularDataModule, guess_schema
from lightning_recsys.data.guesses.evidence import ColumnEvidence, HeldOut

Column = NDArray[np.generic] | Sequence[object]


def guess(folder: Path, label: str, /, **columns: Column) -> Schema:
    """The guess of a table of these columns, which loads unedited."""
    path = folder / "rows.csv"
    lines = map(",".join, zip(*(map(str, column) for column in columns.values()), strict=True))
    path.write_text("\n".join([",".join(columns), *lines]) + "\n")
    schema = guess_schema(path, label=label)
    (folder / "schema.yaml").write_text(schema.to_yaml())
    assert Schema.from_yaml(folder / "schema.yaml") == schema
    data = TabularDataModule(schema=folder / "schema.yaml", cache=folder / "cache")
    data.setup()
    return schema


def drawn(rng: np.random.Generator, log_odds: NDArray[np.float64]) -> NDArray[np.int64]:
    return (rng.random(len(log_odds)) < 1 / (1 + np.exp(-log_odds))).astype(np.int64)


def skewed(rng: np.random.Generator, num_values: int, num_rows: int) -> NDArray[np.int64]:
    weights = 1 / np.arange(1, num_values + 1)
    return rng.permutation(num_values)[rng.choice(num_values, num_rows, p=weights / weights.sum())]


def test_employee_access_when_all_columns_are_ids_then_all_are_categories(tmp_path):
    """Amazon Employee: nothing but ids, some of whose names say so."""
    rng = np.random.default_rng(0)
    sizes = {"RESOURCE": 900, "MGR_ID": 500, "ROLE_TITLE": 300, "ROLE_FAMILY": 60, "ROLE_CODE": 300}
    columns, log_odds = {}, np.full(20_000, 2.5)
    for name, size in sizes.items():
        ids = skewed(rng, size, 20_000)
        log_odds += rng.normal(0, 0.8, size)[ids]
        columns[name] = rng.choice(np.arange(10, 30_000), size, replace=False)[ids]
    schema = guess(tmp_path, "ACTION", ACTION=drawn(rng, log_odds), **columns)
    assert (set(schema.categorical), schema.dense) == (set(sizes), {})
    assert "held-out log loss as ids ." in schema.comments["RESOURCE"]
    assert schema.comments["RESOURCE"].endswith(": categorical")


def test_clicks_when_apps_are_whole_numbers_then_are_ids_and_the_time_of_installing_is_ignored(tmp_path):
    """TalkingData: ids from 1 on without gaps; ``attributed_time`` is there exactly where the label is 1."""
    rng = np.random.default_rng(1)
    effects = {"app": (200, 2.0), "device": (60, 1.2), "os": (80, 1.0), "channel": (120, 1.5)}
    columns, log_odds = {}, np.full(30_000, -4.0)
    for name, (size, effect) in effects.items():
        ids = skewed(rng, size, 30_000)
        log_odds += rng.normal(0, effect, size)[ids]
        columns[name] = 1 + ids
    label = drawn(rng, log_odds)
    seconds = np.datetime64("2017-11-07T00:00:00") + np.sort(rng.integers(0, 80_000, 30_000))
    installed = np.where(label == 1, (seconds + 50).astype(str), "")
    schema = guess(
        tmp_path, "is_attributed", click_time=seconds, attributed_time=installed, is_attributed=label, **columns
    )
    assert (set(schema.categorical), schema.dense, schema.time) == (set(effects), {}, "click_time")
    assert schema.ignore == ("attributed_time",)
    assert "gives the label away: whether a row has it has an AUC of 1.0000" in schema.comments["attributed_time"]


def test_ads_when_columns_are_coded_then_are_ids(tmp_path):
    """Avazu: C14 to C21, sorted codes with gaps of all widths, and rows in the order of hours."""
    rng = np.random.default_rng(2)
    columns, log_odds = {}, np.full(30_000, -1.7)
    for name, (size, first, step) in {"C14": (600, 375, 9), "C17": (200, 112, 9), "C19": (60, 33, 20)}.items():
        codes = first + np.cumsum(rng.integers(1, step, size))
        ids = skewed(rng, size, 30_000)
        log_odds += rng.normal(0, 0.8, size)[ids]
        columns[name] = codes[ids]
    hour = 14102100 + np.sort(rng.integers(0, 24, 30_000))
    schema = guess(tmp_path, "click", click=drawn(rng, log_odds), hour=hour, **columns)
    assert (set(schema.categorical), schema.dense, schema.time) == ({"C14", "C17", "C19"}, {}, "hour")


def test_ids_when_they_are_drawn_evenly_without_gaps_then_their_effects_tell(tmp_path):
    """Nothing in the values says that they are ids: from 1000 to 1399, one as often as another."""
    rng = np.random.default_rng(3)
    shop, age = rng.integers(400, size=20_000), rng.integers(18, 80, 20_000)
    log_odds = rng.normal(0, 1, 400)[shop] + (age - 49) / 20
    schema = guess(tmp_path, "bought", shop=1000 + shop, age=age, bought=drawn(rng, log_odds))
    assert (set(schema.categorical), set(schema.dense)) == ({"shop"}, {"age"})
    assert schema.comments["age"].endswith(": dense")


def test_churn_when_numbers_go_up_and_down_smoothly_then_stay_numbers(tmp_path):
    """Telco: months, charges, and an id of its own in every row."""
    rng = np.random.default_rng(4)
    tenure, monthly = rng.integers(0, 73, 7000), rng.integers(1800, 11_800, 7000) / 100
    contract = rng.choice(["Month-to-month", "One year", "Two year"], 7000)
    log_odds = np.where(contract == "Two year", -2, 0) - tenure / 20 + monthly / 60
    number = rng.permutation(7000) + 10_000
    schema = guess(
        tmp_path,
        "Churn",
        customerID=[f"{x}-ABCDE" for x in number],
        tenure=tenure,
        Contract=contract,
        MonthlyCharges=monthly,
        Churn=np.where(drawn(rng, log_odds), "Yes", "No"),
    )
    assert (set(schema.categorical), set(schema.dense)) == ({"Contract"}, {"tenure", "MonthlyCharges"})
    assert (schema.ignore, schema.label.rule) == (("customerID",), '== "Yes"')


def test_credit_when_rows_are_few_then_numbers_are_not_taken_for_ids(tmp_path):
    """German credit: 1000 rows, codes in words, ages and amounts."""
    rng = np.random.default_rng(5)
    status, age = rng.integers(4, size=1000), 19 + rng.gamma(2, 8, 1000).astype(int)
    amount = rng.lognormal(7.7, 0.8, 1000).astype(int)
    log_odds = -0.8 * status + np.log(amount / 2000) - (age - 35) / 40
    label = np.where(drawn(rng, log_odds), "bad", "good")
    codes = [f"A1{x}" for x in status]
    schema = guess(tmp_path, "class", status=codes, age=age, amount=amount, **{"class": label})
    assert (set(schema.categorical), set(schema.dense)) == ({"status"}, {"age", "amount"})


def test_ratings_when_ages_and_zip_codes_are_numbers_then_zip_codes_are_ids(tmp_path):
    """MovieLens: users, films and zip codes with tastes of their own; the age is one of seven."""
    rng = np.random.default_rng(6)
    user, film = rng.integers(300, size=20_000), skewed(rng, 500, 20_000)
    zips, ages = rng.choice(np.arange(1000, 99_950), 120)[rng.integers(120, size=300)], rng.choice([1, 18, 25, 56], 300)
    log_odds = rng.normal(0, 0.8, 300)[user] + rng.normal(0, 1, 500)[film]
    rating = np.clip(np.round(3.5 + log_odds + rng.normal(0, 0.7, 20_000)), 1, 5).astype(int)
    columns = {"user": 1 + user, "movie": 1 + film, "zip": zips[user], "age": ages[user]}
    schema = guess(tmp_path, "rating", **columns, rating=rating)
    assert (set(schema.categorical), schema.dense) == ({"user", "movie", "zip", "age"}, {})
    assert schema.label.rule == ">= 4"


def test_passengers_when_a_column_repeats_the_label_then_is_ignored_and_one_near_it_is_named(tmp_path):
    """Titanic: ``alive`` is the label; who has a boat has mostly been saved, and nothing else tells so much."""
    rng = np.random.default_rng(7)
    sex, fare = rng.choice(["male", "female"], 900), rng.lognormal(3, 1, 900).round(2)
    label = drawn(rng, np.where(sex == "male", -1.5, 1.0))
    boat = np.where(rng.random(900) < np.where(label, 0.93, 0.01), rng.choice(["A", "B", "3", "12"], 900), "")
    alive = np.where(label, "yes", "no")
    schema = guess(tmp_path, "survived", survived=label, sex=sex, fare=fare, boat=boat, alive=alive)
    assert (set(schema.categorical), set(schema.dense)) == ({"sex", "boat"}, {"fare"})
    assert schema.ignore == ("alive",)
    assert schema.comments["alive"] == "gives the label away: by itself it has an AUC of 1.0000 on held-out rows"
    assert "all others together" in schema.comments["boat"]
    assert "values in the sample" not in schema.comments["boat"]
    assert "AUC" not in schema.comments["sex"]


def test_amount_when_it_is_paid_by_buyers_alone_then_is_ignored(tmp_path):
    rng = np.random.default_rng(8)
    shop = rng.integers(50, size=5000)
    label = drawn(rng, rng.normal(0, 1, 50)[shop])
    paid = np.where(label, rng.lognormal(2, 1, 5000).round(2), 0)
    schema = guess(tmp_path, "bought", shop=shop, paid=paid, bought=label)
    assert (set(schema.categorical), schema.ignore) == ({"shop"}, ("paid",))


def test_number_when_it_has_a_trend_and_values_with_effects_of_their_own_then_is_both(tmp_path):
    rng = np.random.default_rng(9)
    house = rng.integers(1, 3001, 20_000)  # along a road, some seven rows each
    log_odds = (house - 1500) / 500 + rng.normal(0, 0.9, 3001)[house]
    schema = guess(tmp_path, "sold", house=house, sold=drawn(rng, log_odds))
    assert set(schema.dense) == {"house"}
    assert {name: feature.column for name, feature in schema.categorical.items()} == {"house_id": "house"}
    assert schema.comments["house_id"] == schema.comments["house"]
    assert schema.comments["house"].endswith(": both")


@pytest.mark.parametrize(("effect", "by"), [(1.5, "time"), (0.0, "share")])
def test_split_when_the_label_drifts_with_time_then_is_by_time(tmp_path, effect, by):
    rng = np.random.default_rng(10)
    seconds = np.sort(rng.integers(0, 40 * 86_400, 8000))
    at = np.datetime64("2026-01-01T00:00:00") + seconds
    # by night more than by day in either case, which is no drift
    log_odds = effect * seconds / seconds[-1] + np.cos(seconds / 86_400 * 2 * np.pi) - 1
    schema = guess(tmp_path, "click", shown=at, city=rng.choice(["a", "b"], 8000), click=drawn(rng, log_odds))
    assert (schema.time, schema.split.by) == ("shown", by)
    assert ("the label drifts: " in schema.comments["schema.split"]) == (by == "time")


@pytest.mark.parametrize(("power", "transform"), [(1, "none"), (0, "log")])
def test_logarithm_when_numbers_are_skewed_then_the_rows_choose_it(tmp_path, power, transform):
    """Not so skewed that the values alone would; with a label that goes with the number, or with its logarithm."""
    rng = np.random.default_rng(11)
    views = rng.lognormal(3, 0.9, 8000).round(1)
    log_odds = views / 30 - 1 if power else 1.5 * (np.log1p(views) - 3)
    schema = guess(tmp_path, "click", views=views, city=rng.choice(["a", "b"], 8000), click=drawn(rng, log_odds))
    assert schema.dense["views"].transform == transform


def test_column_when_it_says_nothing_then_its_name_and_its_values_decide(tmp_path):
    rng = np.random.default_rng(12)
    columns = {name: rng.integers(1, 200, 3000) for name in ("visits", "shop_id", "postal code")}
    schema = guess(tmp_path, "click", **columns, click=rng.integers(2, size=3000))
    assert (set(schema.categorical), set(schema.dense)) == ({"shop_id", "postal code"}, {"visits"})
    assert all("no clear difference" in schema.comments[name] for name in columns)


@pytest.mark.parametrize("labels", [[1] * 300, [0] * 290 + [1] * 10, ["", "0", "1"] * 100], ids=["one", "few", "gaps"])
def test_label_when_it_is_of_one_kind_or_missing_then_a_guess_is_made(tmp_path, labels):
    """Below 20 rows of a label nothing is said about columns; rows without a label are left out."""
    path = tmp_path / "rows.csv"
    shops = [1 + 7 * i % 37 for i in range(300)]
    path.write_text("\n".join(["click,shop,city", *(f"{y},{x},c{x % 3}" for y, x in zip(labels, shops, strict=True))]))
    schema = guess_schema(path, label="click")
    assert {"shop", "city"} == {*schema.dense, *schema.categorical}
    assert ("log loss" in schema.comments["shop"]) == (labels.count("1") == 100)


def evidence_of(values: NDArray[np.int64], labels: NDArray[np.int64]) -> ColumnEvidence:
    held_out = HeldOut.deal(labels.astype(np.float32))
    assert held_out is not None
    numbers, codes = np.unique(values, return_inverse=True)
    return ColumnEvidence(held_out, codes, numbers.astype(np.float64))


@pytest.mark.parametrize(("num_rows", "num_values"), [(200, 20), (1000, 100), (5000, 2500), (5000, 70)])
def test_evidence_when_values_have_no_effect_then_hardly_ever_anything_wins(num_rows, num_values):
    """Two standard errors are exceeded by chance in one of forty columns; the best of several fits adds to that."""
    rng = np.random.default_rng(13)
    won = 0
    for _ in range(60):
        evidence = evidence_of(rng.integers(num_values, size=num_rows), rng.integers(2, size=num_rows))
        fits = (evidence.as_ids(), evidence.as_number())
        won += any(evidence.is_better(fit, evidence.prior_KV) for fit in fits)
    assert won <= 4


def test_evidence_when_ids_hardly_repeat_then_they_tell_no_more_than_the_share_of_positives():
    rng = np.random.default_rng(14)
    evidence = evidence_of(rng.integers(50_000, size=20_000), rng.integers(2, size=20_000))
    assert evidence.loss(evidence.as_ids()) > 0.999 * evidence.loss(evidence.prior_KV)
    assert abs(evidence.auc(evidence.as_ids()) - 0.5) < 0.02


def test_evidence_when_a_value_is_predicted_then_its_own_fold_has_not_been_seen():
    """Each value is in one fold alone, with one label: who looks at the rows that it predicts has no loss."""
    rng = np.random.default_rng(15)
    labels = rng.integers(2, size=2000)
    held_out = HeldOut.deal(labels.astype(np.float32))
    codes = held_out.folds_N * 2 + labels
    evidence = ColumnEvidence(held_out, codes, None)
    np.testing.assert_allclose(evidence.log_odds(evidence.as_ids()), 0, atol=1e-12)


def test_folds_then_have_equal_shares_of_each_label_and_are_the_same_each_time():
    labels = np.array([1.0] * 50 + [np.nan] * 7 + [0.0] * 450, dtype=np.float32)
    first, second = HeldOut.deal(labels), HeldOut.deal(labels)
    np.testing.assert_array_equal(first.folds_N, second.folds_N)
    assert len(first.places_N) == 500
    assert np.bincount(first.folds_N, first.labels_N).tolist() == [10] * 5
    assert np.bincount(first.folds_N).tolist() == [100] * 5


def test_auc_then_is_the_share_of_ordered_pairs():
    """Against all pairs, one by one."""
    rng = np.random.default_rng(16)
    values = rng.integers(12, size=300)
    labels = drawn(rng, (values - 6) / 4)
    evidence = evidence_of(values, labels)
    p_KV = evidence.as_ids()
    scores, folds = p_KV[evidence.held_out.folds_N, evidence.codes_N], evidence.held_out.folds_N
    areas = []
    for fold in range(5):
        ones, zeros = (scores[(folds == fold) & (labels == label)] for label in (1, 0))
        ahead, level = ones[:, None] > zeros, ones[:, None] == zeros
        areas.append((ahead + 0.5 * level).mean())
    assert evidence.auc(p_KV) == pytest.approx(np.mean(areas))


def test_column_when_rows_with_a_label_do_not_have_it_then_a_guess_is_made(tmp_path):
    """Numbers, floats and words that only rows without a label have: nothing is known of them."""
    path = tmp_path / "rows.csv"
    rows = [f"{i % 2},c{i % 3},,," for i in range(300)] + [
        f",c{i % 3},{1 + i % 37},{i / 7},w{i % 5}" for i in range(300)
    ]
    path.write_text("\n".join(["click,city,visits,price,word", *rows]))
    schema = guess_schema(path, label="click")
    assert (set(schema.dense), set(schema.categorical)) == ({"visits", "price"}, {"city", "word"})
    assert not any("log loss" in remark for remark in schema.comments.values())


def test_ids_of_a_number_when_their_name_is_taken_then_have_another(tmp_path):
    rng = np.random.default_rng(17)
    house = rng.integers(1, 3001, 20_000)
    log_odds = (house - 1500) / 500 + rng.normal(0, 0.9, 3001)[house]
    schema = guess(tmp_path, "sold", house=house, house_id=rng.integers(5, size=20_000), sold=drawn(rng, log_odds))
    assert {name: feature.column for name, feature in schema.categorical.items()} == {
        "house_id": None,
        "house_id_2": "house",
    }


def test_rows_when_they_are_sorted_by_the_label_then_their_number_gives_it_away(tmp_path):
    rng = np.random.default_rng(18)
    city, label = rng.choice(["a", "b"], 2000), np.arange(2000) // 1000
    schema = guess(tmp_path, "click", index=np.arange(2000), city=city, click=label)
    assert (set(schema.categorical), schema.ignore) == ({"city"}, ("index",))
    assert schema.comments["index"].startswith("gives the label away")


def test_numbers_that_tell_the_label_when_the_others_tell_it_together_then_stay_with_a_remark(tmp_path):
    """Iris has such rows: two measures of the petal separate one kind, and so do those of the sepal together."""
    rng = np.random.default_rng(0)
    label = rng.integers(2, size=2000)
    petal = np.round(label * 4 + rng.normal(size=2000) * 0.5, 3)
    sepal = {f"sepal_{i}": np.round(label * 2 + rng.normal(size=2000), 3) for i in range(4)}
    where = rng.choice(["field", "wood"], 2000)
    schema = guess(tmp_path, "label", petal=petal, **sepal, where=where, label=label)
    assert "petal" in schema.dense
    assert "an easy label" in schema.comments["petal"]

    (tmp_path / "hard").mkdir()
    hard = guess(tmp_path / "hard", "label", petal=petal, sepal=sepal["sepal_0"], where=where, label=label)
    assert hard.ignore == ("petal",)
    assert hard.comments["petal"].startswith("gives the label away")
