"""Graphs from tables of nodes and edges, and of users, items and what they took."""

from __future__ import annotations

import csv
import json
import logging

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from lightning_recsys.data.graph import InteractionDataModule, NodeData, NodeDataModule

LARGE = 1 << 33  # ids beyond 32 bits

Table = dict[str, list]


SUFFIXES = ("csv", "parquet", "feather", "jsonl")


def write(table: Table, path) -> None:
    """As CSV, with nothing where a value is missing, or as its ending says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table(table), path)
        return
    if path.suffix == ".feather":
        feather.write_feather(pa.table(table), path)
        return
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, pa.table(table).to_pylist())), encoding="utf-8")
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))


def with_cell(table: Table, column: str, row: int, value) -> Table:
    return {**table, column: [*table[column][:row], value, *table[column][row + 1 :]]}


def some(table: Table, rows) -> Table:
    return {name: [column[row] for row in rows] for name, column in table.items()}


def papers(count: int = 60) -> Table:
    """Papers in two fields, in no order."""
    order = np.random.default_rng(0).permutation(count).tolist()
    return {
        "paper": [f"p{i:02}" for i in order],
        "field": [("bio", "art")[i % 2] for i in order],
        "year": [2000 + i // 6 for i in order],
        "venue": [f"v{i % 4}" for i in order],
        "pages": [i * 1.5 for i in order],
        "words": ["|".join(f"w{(i * k) % 7}" for k in range(1, 4)) for i in order],
    }


def citations(count: int = 60) -> Table:
    random = np.random.default_rng(1)
    ends = random.integers(0, count, (2, 150)).tolist()
    return {
        "from": [f"p{i:02}" for i in ends[0]],
        "to": [f"p{i:02}" for i in ends[1]],
        "strength": np.round(random.random(150), 3).tolist(),
    }


def distinct_by(ids, words) -> dict:
    """The ids that come with each word."""
    found: dict = {}
    for number, word in zip(ids.tolist(), words, strict=True):
        found.setdefault(word, set()).add(number)
    return found


@pytest.fixture
def folder(tmp_path):
    for suffix in SUFFIXES:
        write(papers(), tmp_path / f"nodes.{suffix}")
        write(citations(), tmp_path / f"edges.{suffix}")
    return tmp_path


NODES = {"label": "field", "dense": ["pages"], "categorical": ["venue"], "multi_valued": ["words"]}


def make(folder, nodes=None, edges=None, **options) -> NodeDataModule:
    nodes = {"files": "nodes.csv", **NODES} if nodes is None else nodes
    edges = {"files": "edges.csv", "weight": "strength"} if edges is None else edges
    return NodeDataModule(nodes, edges=edges, root=str(folder), num_neighbors=[2, 2], **options)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_tables_when_read_then_nodes_have_the_columns_of_their_rows(folder, suffix):
    edges = {"files": f"edges.{suffix}", "weight": "strength"}
    nodes = make(folder, {"files": f"nodes.{suffix}", **NODES}, edges).nodes
    table, cited = papers(), citations()
    assert nodes.ids.to_pylist() == table["paper"]
    assert nodes.classes == ("art", "bio")
    assert [nodes.classes[label] for label in nodes.labels] == table["field"]
    pages = np.array(table["pages"])
    np.testing.assert_allclose(nodes.dense[:, 0], (pages - pages.mean()) / pages.std(), rtol=1e-5)
    assert nodes.bags["venue"].offsets.tolist() == list(range(61))
    venues = distinct_by(nodes.bags["venue"].ids, table["venue"])
    assert len(venues) == len(set.union(*venues.values())) == 4
    words = nodes.bags["words"]
    assert np.diff(words.offsets).tolist() == [3] * 60
    of_id = {}
    for row, texts in enumerate(text.split("|") for text in table["words"]):
        for number, text in zip(words.ids[words.offsets[row] : words.offsets[row + 1]], texts, strict=True):
            assert of_id.setdefault(int(number), text) == text
    assert sorted(of_id.values()) == [f"w{i}" for i in range(7)]
    number = {name: i for i, name in enumerate(table["paper"])}
    matrix = np.zeros((60, 60))
    for one, other, strength in zip(*cited.values(), strict=True):
        matrix[number[one], number[other]] += strength
    matrix += np.where(np.eye(60) > 0, 0, matrix.T)
    found = np.zeros((60, 60))
    for node in range(60):
        begin, end = nodes.graph.indptr[node : node + 2]
        found[node, nodes.graph.indices[begin:end]] = nodes.graph.weights[begin:end]
    np.testing.assert_allclose(found, matrix, rtol=1e-5)


def test_edges_when_directed_then_lead_from_source_to_target(folder):
    nodes = make(folder, edges={"files": "edges.csv", "source": "to", "target": "from", "undirected": False}).nodes
    number = {name: i for i, name in enumerate(papers()["paper"])}
    cited = citations()
    found = set(map(tuple, nodes.graph.edge_index().T.tolist()))
    assert found == {(number[a], number[b]) for a, b in zip(cited["to"], cited["from"], strict=True)}
    assert nodes.graph.weights is None
    assert nodes.graph.num_edges == 150


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("ids", "own"),
    [
        ([LARGE + 5, LARGE, 7], [LARGE + 5, LARGE, 7]),
        (["007", "7", "x"], ["007", "7", "x"]),
        (["b c", "é", "-"], ["b c", "é", "-"]),
    ],
    ids=["large", "zeros", "words"],
)
def test_ids_when_of_any_kind_then_are_kept_as_they_are(tmp_path, suffix, ids, own):
    write({"id": ids, "y": ["a", "b", "a"]}, tmp_path / f"n.{suffix}")
    write({"source": ids[:2], "target": ids[1:]}, tmp_path / f"e.{suffix}")
    nodes = make(tmp_path, {"files": f"n.{suffix}", "label": "y"}, f"e.{suffix}", split={}).nodes
    assert nodes.ids.to_pylist() == own
    assert nodes.graph.edge_index().T.tolist() == [[1, 0], [0, 1], [2, 1], [1, 2]]


def test_features_when_nobody_names_them_then_are_guessed_and_told(folder, caplog):
    with caplog.at_level(logging.INFO):
        data = make(folder, {"files": "nodes.csv", "label": "field", "ignore": ["year"]}, "edges.csv")
        assert data.fields == {"node": 60, "venue": 6, "words": 9}
    assert data.num_dense == 1
    assert "data.nodes nodes.csv: dense pages; categorical venue, words" in caplog.text
    assert data.nodes.graph.weights is None, "a weight is one only where it is named"
    features = {"files": "nodes.csv", "label": "field", "dense": ["pages"]}
    assert make(folder, features, "edges.csv", node_ids=False).fields == {}


def test_split_when_a_column_names_it_then_is_that_and_unlabelled_nodes_are_in_none(folder):
    table = with_cell(papers(), "field", 3, None)
    table["part"] = [("train", "valid", "Test", "")[row % 4] for row in range(60)]
    write(table, folder / "nodes.csv")
    nodes = make(folder, {"files": "nodes.csv", "split": "part", **NODES}).nodes
    assert {name: part.tolist() for name, part in nodes.splits.items()} == {
        "train": list(range(0, 60, 4)),
        "validation": list(range(1, 60, 4)),
        "test": list(range(2, 60, 4)),
    }
    assert nodes.labels[3] == -1


def test_split_when_by_time_then_the_latest_nodes_are_for_test(folder):
    nodes = {"files": "nodes.csv", "time": "year", **NODES}
    data = make(folder, nodes, split={"by": "time", "validation": 0.2, "test": 0.1})
    years = np.array(papers()["year"])
    parts = {name: set(years[part].tolist()) for name, part in data.nodes.splits.items()}
    assert parts == {"train": set(range(2000, 2007)), "validation": {2007, 2008}, "test": {2009}}
    assert sum(map(len, data.nodes.splits.values())) == 60
    with pytest.raises(ValueError, match=r"name its column as data\.nodes\.time"):
        make(folder, split={"by": "time"}).setup()
    write({**papers(), "one": [1] * 60}, folder / "nodes.csv")
    with pytest.raises(ValueError, match=r"data\.split leaves no train rows of 60 by time"):
        make(folder, {**nodes, "time": "one"}, split={"by": "time", "test": 0.1}).setup()


def test_nodes_when_mapped_then_ids_classes_and_weights_are_there_and_changed_tables_are_refused(folder):
    data = make(folder, mapped=str(folder / "arrays"))
    data.prepare_data()
    data.setup()
    plain = make(folder).nodes
    assert isinstance(data.nodes.graph.indices, np.memmap)
    assert data.nodes.ids.to_pylist() == plain.ids.to_pylist()
    assert data.nodes.classes == plain.classes
    assert data.nodes.graph.weights.tolist() == plain.graph.weights.tolist()
    write(some(citations(), range(50)), folder / "edges.csv")
    with pytest.raises(ValueError, match="name another folder, or remove this one"):
        make(folder, mapped=str(folder / "arrays")).setup()


def test_checkpoint_when_tables_have_changed_then_is_refused(folder):
    data = make(folder)
    data.setup()
    state = data.state_dict()
    again = make(folder)
    again.load_state_dict(state)
    again.setup()
    write(some(papers(), range(59, -1, -1)), folder / "nodes.csv")  # the same nodes, numbered otherwise
    other = make(folder)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="not those that the checkpoint was trained on"):
        other.setup()


NODE_FAULTS = {
    "duplicate": (
        lambda t: some(t, [*range(60), 4]),
        r"nodes\.csv, row 61, column 'paper': 'p\d\d' is the id of .*nodes\.csv, row 5, too",
    ),
    "no id": (lambda t: with_cell(t, "paper", 7, None), r"row 8, column 'paper': the id is missing"),
    "empty": (lambda t: some(t, []), r"nodes\.csv has a header and no rows"),
    "no label": (
        lambda t: {name: t[name] for name in t if name != "field"},
        r"nodes\.csv has no column 'field'\. It has paper, year",
    ),
    "number": (
        lambda t: with_cell(t, "pages", 59, "many"),
        r"row 60 \(line 61\), column 'pages': must be a finite number .* got 'many'",
    ),
    "no node for an edge": (
        lambda t: some(t, [row for row in range(60) if t["paper"][row] != "p07"]),
        r"edges\.csv, row \d+, column '(from|to)': .* no node 'p07'",
    ),
}


@pytest.mark.parametrize("fault", NODE_FAULTS)
def test_node_table_when_bad_then_file_row_and_column_are_named(folder, fault):
    change, message = NODE_FAULTS[fault]
    write(change(papers()), folder / "nodes.csv")
    with pytest.raises(ValueError, match=message):
        make(folder).setup()


EDGE_FAULTS = {
    "unknown node": (
        lambda t: with_cell(t, "to", 9, "p99"),
        r"row 10, column 'to': there is no node 'p99' in .*nodes\.csv\.",
    ),
    "no end": (lambda t: with_cell(t, "to", 9, None), r"row 10, column 'to': the value is missing"),
    "no weight": (
        lambda t: with_cell(with_cell(t, "strength", 148, None), "strength", 149, None),
        r"row 149, column 'strength': the weight is missing.* 1 more rows",
    ),
    "negative": (lambda t: with_cell(t, "strength", 3, -9), r"row 4, column 'strength': .* from 0 on, got -9\."),
    "word": (
        lambda t: with_cell(t, "strength", 0, "much"),
        r"row 1 \(line 2\), column 'strength': must be a finite number",
    ),
    "empty": (lambda t: some(t, []), r"edges\.csv has a header and no rows"),
}


@pytest.mark.parametrize("fault", EDGE_FAULTS)
def test_edge_table_when_bad_then_file_row_and_column_are_named(folder, fault):
    change, message = EDGE_FAULTS[fault]
    write(change(citations()), folder / "edges.csv")
    with pytest.raises(ValueError, match=message):
        make(folder).setup()


def test_rows_when_in_several_files_then_the_file_is_named_that_has_the_fault(folder):
    write(some(citations(), range(100)), folder / "edges.csv")
    write({**some(citations(), range(50)), "to": ["nobody"] * 50}, folder / "more.csv")
    with pytest.raises(ValueError, match=r"more\.csv, row 1, column 'to': there is no node 'nobody'.* 49 more rows"):
        make(folder, edges={"files": ["edges.csv", "more.csv"]}).setup()


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ({"files": "nodes.csv"}, "edges.csv", r"data\.nodes\.label is missing: .* They are paper, field"),
        ({"files": "nodes.csv", "labl": "x"}, "edges.csv", r"data\.nodes has no key 'labl'\. Did you mean 'label'"),
        (
            {"files": "nodes.csv", "label": "field", "id": "papr"},
            "edges.csv",
            r"no column 'papr'\. Did you mean 'paper'",
        ),
        ({"files": "nodes.csv", "label": "field", "dense": ["venue"]}, "edges.csv", "column 'venue': must be a finite"),
        (
            {"files": "nodes.csv", "label": "field", "dense": {"pages": {"fil": 0}}},
            "edges.csv",
            r"data\.nodes\.dense\.pages",
        ),
        (
            {"files": "nodes.csv", "label": "field"},
            {"files": "edges.csv", "wight": "x"},
            r"data\.edges has no key 'wight'",
        ),
        ({"files": "nodes.csv", "label": "field"}, None, "two tables of one graph: name both"),
    ],
)
def test_options_when_wrong_then_the_key_is_named(folder, nodes, edges, message):
    with pytest.raises(ValueError, match=message):
        NodeDataModule(nodes, edges=edges, root=str(folder)).setup()


def test_file_when_it_is_not_there_then_the_table_is_named(folder):
    with pytest.raises(FileNotFoundError, match=r"data\.edges\.files: there is no file .*nowhere\.csv.*data\.root"):
        make(folder, edges="nowhere.csv").setup()


# --- users and items -------------------------------------------------------------------------------------------------


def shop(folder) -> tuple[Table, Table, Table]:
    """20 users, of whom the last took nothing, 12 items; 30 of 120 pairs come again an hour later."""
    random = np.random.default_rng(2)
    pairs = random.choice(19 * 12, 120, replace=False).tolist()
    taken = {"user": [f"u{i // 12}" for i in pairs], "item": [LARGE + i % 12 for i in pairs]}
    taken |= {"stars": random.integers(1, 6, 120).tolist(), "at": (random.permutation(120) * 60).tolist()}
    again = {**some(taken, range(30)), "stars": [2] * 30, "at": [at + 3630 for at in taken["at"][:30]]}
    taken = {name: taken[name] + again[name] for name in taken}
    users = {"user": [f"u{i}" for i in range(20)], "age": list(range(20)), "town": list("abcde") * 4}
    items = {"item": [LARGE + i for i in range(12)], "kind": list("xyz") * 4, "price": [i / 4 for i in range(12)]}
    for name, table in (("taken.csv", taken), ("users.csv", users), ("items.parquet", items)):
        write(table, folder / name)
    return taken, users, items


TABLES = {"users": {"files": "users.csv", "dense": ["age"], "categorical": ["town"]}, "items": "items.parquet"}


def make_shop(folder, **options) -> InteractionDataModule:
    options = {"weight": "stars", "time": "at", **TABLES, **options}
    return InteractionDataModule(file="taken.csv", root=str(folder), num_neighbors=[2], **options)


def test_users_and_items_when_they_have_tables_then_their_features_are_those_of_the_nodes(tmp_path):
    _, users, items = shop(tmp_path)
    data = make_shop(tmp_path)
    assert data.fields == {"node": 32, "user_town": 7, "item_kind": 5}
    assert data.num_dense == 2
    nodes, age = data.nodes, np.array(users["age"])
    np.testing.assert_allclose(nodes.dense[:20, 0], (age - age.mean()) / age.std(), rtol=1e-5)
    assert not nodes.dense[20:, 0].any()
    assert not nodes.dense[:20, 1].any()
    assert nodes.dense[20:, 1].std() == pytest.approx(1, rel=1e-5)
    towns, kinds = nodes.bags["user_town"], nodes.bags["item_kind"]
    assert np.diff(towns.offsets).tolist() == [1] * 20 + [0] * 12
    assert np.diff(kinds.offsets).tolist() == [0] * 20 + [1] * 12
    assert [len(x) for x in distinct_by(towns.ids, users["town"]).values()] == [1] * 5
    assert data.interactions.user_ids.to_pylist() == users["user"]
    assert data.interactions.item_ids.to_pylist() == items["item"]
    batch = next(iter(data.train_dataloader()))
    assert batch.dense.shape == (len(batch.neighborhood.n_id), 2)
    assert make_shop(tmp_path, node_ids=False).fields == {"user_town": 7, "item_kind": 5}


def test_weights_when_a_pair_comes_again_then_add_up(tmp_path):
    taken, _, _ = shop(tmp_path)
    every = make_shop(tmp_path).interactions
    expected: dict = {}
    for user, item, stars, _ in zip(*taken.values(), strict=True):
        expected[user, item] = expected.get((user, item), 0) + stars
    names = every.user_ids.to_pylist(), every.item_ids.to_pylist()
    assert len(every.users) == 120
    for user, item, weight in zip(every.users, every.items, every.weights, strict=True):
        assert expected[names[0][user], names[1][item]] == weight
    graph = make_shop(tmp_path, split={"validation": 0, "test": 0}).nodes.graph
    assert graph.weights.sum() == 2 * sum(taken["stars"])


def test_split_when_by_time_then_nothing_later_is_trained_on_and_no_pair_is_held_out_that_came_before(tmp_path):
    taken, _, _ = shop(tmp_path)
    data = make_shop(tmp_path, split={"by": "time", "validation": 0.2, "test": 0.2})
    parts, times = data.parts, np.sort(taken["at"])
    first, last = times[90], times[120]
    assert parts["train"].times.max() < first <= parts["validation"].times.min()
    assert parts["validation"].times.max() < last <= parts["test"].times.min()
    keys = {name: set(zip(part.users.tolist(), part.items.tolist(), strict=True)) for name, part in parts.items()}
    assert not keys["train"] & keys["validation"]
    assert not (keys["train"] | keys["validation"]) & keys["test"]
    rows = [dict(zip(taken, row, strict=True)) for row in zip(*taken.values(), strict=True)]
    assert parts["train"].weights.sum() == sum(row["stars"] for row in rows if row["at"] < first), "none of later ones"
    names = data.interactions.user_ids.to_pylist(), data.interactions.item_ids.to_pylist()
    before, tested = (
        {(row["user"], row["item"]) for row in rows if (row["at"] < last) == earlier} for earlier in (True, False)
    )
    assert {(names[0][a], names[1][b]) for a, b in keys["test"]} == tested - before
    with pytest.raises(ValueError, match=r"data\.split\.by is time: name the column"):
        make_shop(tmp_path, time=None, split={"by": "time"})


@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [
        ("user", 5, "nobody", r"row 6, column 'user': there is no node 'nobody' in .*users\.csv"),
        ("item", 5, 17, r"row 6, column 'item': there is no node '17' in .*items\.parquet"),
        ("at", 5, None, r"row 6 \(line 7\), column 'at': the time must be a number"),
        ("stars", 0, -1, r"row 1, column 'stars': a weight must be from 0 on, got -1\."),
    ],
)
def test_interactions_when_bad_then_file_row_and_column_are_named(tmp_path, column, row, value, message):
    taken, _, _ = shop(tmp_path)
    write(with_cell(taken, column, row, value), tmp_path / "taken.csv")
    with pytest.raises(ValueError, match=message):
        make_shop(tmp_path).setup()


def test_interactions_when_in_parquet_without_tables_then_ids_keep_their_types(tmp_path):
    taken, _, _ = shop(tmp_path)
    write(taken, tmp_path / "taken.parquet")
    data = InteractionDataModule(file="taken.parquet", root=str(tmp_path), num_neighbors=[2])
    assert data.interactions.user_ids.type == pa.string()
    assert data.interactions.item_ids.to_pylist() == sorted(set(taken["item"]))
    assert (
        data.digest != InteractionDataModule(file="taken.csv", root=str(tmp_path), num_neighbors=[2], user="at").digest
    )
    write({"user": [1], "item": pa.array([None], pa.int64())}, tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match=r"bad\.parquet, row 1, column 'item': the value is missing"):
        InteractionDataModule(file="bad.parquet", root=str(tmp_path), num_neighbors=[2]).setup()


def test_nodes_when_ids_are_of_another_number_then_are_refused():
    graph = make_graph()
    with pytest.raises(ValueError, match=r"the graph has 2 nodes.*got \{'ids': 1\}"):
        NodeData(graph, np.zeros(2, np.int64), ids=pa.array(["a"]))


def make_graph():
    from lightning_recsys.data.graph import CSRGraph

    return CSRGraph.from_edge_index([[0], [1]], num_nodes=2)
