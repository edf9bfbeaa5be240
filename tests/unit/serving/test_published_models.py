"""Published models score as those that were trained: every model, raw rows included; over HTTP, too."""

import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from ports import free_port, let_go

from lightning_recsys.data import TabularDataModule
from lightning_recsys.data.preparation.encoding import Encoding
from lightning_recsys.data.tables.schema import Schema
from lightning_recsys.errors import PublishedVersionError
from lightning_recsys.models import DCN, DLRM, DCNv2, DeepFM, FactorizationMachine, LogisticRegression, WideDeep
from lightning_recsys.serving import ModelReader, PublishedModel, dense, export, export_model
from lightning_recsys.serving.encoders import SchemaEncoder, encoder_of
from lightning_recsys.serving.hub import load_pretrained, save_pretrained
from lightning_recsys.serving.onnx import export_onnx
from lightning_recsys.serving.program import load_program

SMALL = {
    LogisticRegression: {},
    FactorizationMachine: {"embedding_dim": 4},
    DeepFM: {"embedding_dim": 4, "hidden": (8,), "normalization": "batch"},
    WideDeep: {"embedding_dim": 4, "hidden": (8,), "pooling": "mean"},
    DCN: {"embedding_dim": 4, "hidden": (8,)},
    DCNv2: {"embedding_dim": 4, "hidden": (8,), "normalization": "local"},
    DLRM: {"embedding_dim": 4, "bottom_hidden": (8,), "top_hidden": (8,)},
}
LINES = [
    {"price": price, "user": user, "tags": tags, "clicked": i % 2, "other": 1}
    for i, (price, user, tags) in enumerate(
        [(1.5, "ann", "a|b"), (None, "bob", "b"), (100, "ann", ""), (7, "eve", "c|a|a"), (0.25, "bob", "b|c")] * 20
    )
]
SCHEMA = {
    "files": "rows.csv",
    "label": "clicked",
    "dense": {"price": {"transform": "log"}},
    "categorical": {"user": {}, "other": {"hash_buckets": 7}},
    "multi_valued": ["tags"],
    "split": {"validation": 0.1, "test": 0.1},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    names = list(LINES[0])
    text = [",".join(names), *(",".join("" if x[n] is None else str(x[n]) for n in names) for x in LINES)]
    (folder / "rows.csv").write_text("\n".join(text) + "\n")
    module = TabularDataModule(schema=SCHEMA, root=folder, batch_size=32, cache=folder / "cache")
    module.prepare_data()
    module.setup("fit")
    return module


def trained(model, data):
    """A model whose parts are what no start has them at."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(x for x in model.buffers() if x.is_floating_point())):
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize("kind", SMALL, ids=lambda kind: kind.__name__)
def test_scores_of_raw_rows_then_they_are_those_of_the_model_on_the_prepared_rows(kind, data, tmp_path, monkeypatch):
    # In this process, which traces nothing else meanwhile: another one takes seconds to start.
    monkeypatch.setattr(export, "export_apart", dense._export)
    model = trained(kind(data.num_dense, data.fields, **SMALL[kind]), data)
    export_model(model, tmp_path / "model", num_dense=data.num_dense, datamodule=data)
    reader = ModelReader(tmp_path / "model")
    rows = {(row["price"], row["user"], row["tags"]): row for row in LINES}
    prepared = data.rows("train")
    batch = prepared.take(torch.arange(len(prepared)))
    with torch.no_grad():
        expected = model(batch.dense, batch.sparse)
        assert torch.allclose(reader.model.logits(batch.dense, batch.sparse), expected, atol=1e-6)
        encoded = reader.model.encoder.encode(list(rows.values()))
        scores = torch.tensor(reader.predict(list(rows.values())).probabilities)
        assert torch.allclose(scores, model(*encoded).sigmoid(), atol=1e-6)
    known = {tuple(x.tolist()) for x in batch.dense}
    assert {tuple(x.tolist()) for x in encoded[0]} <= known
    assert sorted(set(expected.sigmoid().round(decimals=4).tolist())) == sorted(set(scores.round(decimals=4).tolist()))


def test_rows_when_values_are_unknown_missing_or_wrong_then_as_in_training_or_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "export_apart", dense._export)
    model = LogisticRegression(data.num_dense, data.fields)
    export_model(model, tmp_path / "model", num_dense=data.num_dense, datamodule=data)
    reader = ModelReader(tmp_path / "model")
    strange = {"price": None, "user": "zoe", "tags": ["x", "b"], "other": None}
    numbers, sparse = reader.model.encoder.encode([strange, {**strange, "user": None, "price": "3"}])
    assert numbers[0].tolist() == [0.0]  # the mean
    assert sparse.select(("user",)).values.tolist() == [0, 1]
    assert reader.predict([reader.model.encoder.example()]).version == 1
    with pytest.raises(ValueError, match="row 1 has no 'user'"):
        reader.predict([strange, {"price": 1, "tags": "", "other": 2}])
    with pytest.raises(ValueError, match=r"row 0: 'price' must be a finite number.*'many'"):
        reader.predict([{**strange, "price": "many"}])
    # A row's ids are the same whatever the rows beside it look like.
    _, mixed = reader.model.encoder.encode([{**strange, "tags": tags} for tags in (["a", "b"], "a|b", None, "")])
    assert mixed.select(("tags",)).bag_lengths().tolist() == [2, 2, 0, 0]
    first, second = mixed.select(("tags",)).values.view(2, 2).tolist()
    assert first == second == reader.model.encoder.encode([strange | {"tags": "a|b"}])[1].values[-2:].tolist()
    for nested in ([["a"]], [{}], {"a": 1}):
        with pytest.raises(ValueError, match="row 1: 'tags' takes no "):
            reader.predict([strange, {**strange, "tags": nested}])
    for value in ("\ud83d", ["a", "\ud83d"]):  # half of a character
        with pytest.raises(ValueError, match=r"row 1: 'tags' takes no .*\\ud83d"):
            reader.predict([strange, {**strange, "tags": value}])
    text = (tmp_path / "model" / "versions" / "1" / "encoder.json").read_text()
    assert str(data._root) not in text


def test_row_when_others_of_its_request_have_other_types_then_its_ids_are_those_of_training(tmp_path):
    scores, tags = (
        [1e-05, 1e16, 1e-07, 0.1, 2.0, -3.5e20, 5.0, 1 / 3],
        [[5], [1e-07], ["a"], [2.5], [True], [], [0], [7]],
    )
    table = {"label": [0, 1] * 4, "score": scores, "rate": scores}
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    buckets = {"hash_buckets": 1000}
    schema = {"files": "x.parquet", "label": "label", "dense": ["rate"], "categorical": {"score": buckets}}
    data = TabularDataModule(schema=schema | {"split": {"test": 0}}, root=tmp_path, cache=tmp_path / "cache")
    data.setup("fit")
    train = data.rows("train")
    trained = train.take(torch.arange(len(train))).sparse.values.tolist()
    encoder = encoder_of(data, {}, 0)
    strange = ["x", True, None, 7, -1, 10**15]
    rows = [{"score": x, "rate": 1.0} for x in [*scores, *strange]]
    found = encoder.encode(rows)[1].values.tolist()
    assert len(trained) > 5  # the others are for validation
    assert set(trained) <= set(found[:8])
    assert found == [encoder.encode([row])[1].values.item() for row in rows]
    rates = [{"score": 1.0, "rate": x} for x in (True, 0.5, "0.25", None, 3)]
    assert encoder.encode(rates)[0].tolist() == [encoder.encode([row])[0][0].tolist() for row in rates]
    schema = Schema.from_dict({"files": "x", "label": "label", "multi_valued": {"tags": buckets}})
    bags = SchemaEncoder(schema, Encoding(schema, vocabularies={}, statistics={}))
    rows = [{"tags": x} for x in [*tags, "a|5", 5, 1e-07, None, "", [5, "a", 1e-07]]]
    together, alone = bags.encode(rows)[1], [bags.encode([row])[1] for row in rows]
    assert together.values.tolist() == [number for one in alone for number in one.values.tolist()]
    assert together.lengths.tolist() == [number for one in alone for number in one.lengths.tolist()]


@pytest.mark.parametrize("beside", [[], ["a b"], [["c"]]])
def test_row_when_a_text_for_ngrams_is_a_list_then_is_refused_whatever_stands_beside_it(beside):
    title = {"ngrams": "words", "hash_buckets": 9}
    schema = Schema.from_dict({"files": "x", "label": "label", "multi_valued": {"title": title}})
    encoder = SchemaEncoder(schema, Encoding(schema, vocabularies={}, statistics={}))
    with pytest.raises(ValueError, match=r"row 0: 'title' takes one value a row, got \['a'\]\."):
        encoder.encode([{"title": x} for x in [["a"], *beside]])


def test_times_when_a_request_has_numbers_that_could_be_dates_then_are_seconds_as_in_training(tmp_path):
    lines = [f"{i % 2},{1_700_000_000 + 3600 * i},u{i % 3}" for i in range(40)]
    (tmp_path / "x.csv").write_text("\n".join(["click,at,user", *lines]))
    hour = {"column": "at", "transform": "hour"}
    schema = {"files": "x.csv", "label": "click", "categorical": {"hour": hour, "user": {}}, "split": {"test": 0}}
    data = TabularDataModule(schema=schema, root=tmp_path, cache=tmp_path / "cache")
    data.setup("fit")
    encoder = encoder_of(data, {}, 0)

    def hour_of(seconds):
        return encoder.encode([{"at": seconds, "user": "u1"}])[1].select(("hour",)).values.tolist()

    assert hour_of(20240131) == hour_of(20240131 // 3600 % 24 * 3600) != hour_of(7 * 3600)


def test_serving_when_its_extra_is_not_installed_then_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("lightning_recsys.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs the extra \[serving\] .* pip install fsspec safetensors"):
        importlib.import_module("lightning_recsys.serving")


def test_export_when_made_in_its_own_process_then_it_is_the_same(tmp_path):
    model = WideDeep(2, {"a": 5, "b": 4}, embedding_dim=4, hidden=[8])
    part = dense.DensePart(model)
    dense.export_apart(part, 2, tmp_path / "p.pt2")
    program = load_program(tmp_path / "p.pt2")
    rows = {
        path: torch.randn(7, sum(len(table.feature_names) for table in tables), tables[0].embedding_dim)
        for path, tables in part.tables.items()
    }
    assert len(rows) == 2  # of width 4, and of width 1
    inputs = torch.randn(7, 2), rows
    assert torch.allclose(program(*inputs), part(*inputs), atol=1e-6)


def test_hub_folder_when_saved_then_it_loads_as_it_was_and_its_card_has_the_metrics(data, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "export_apart", dense._export)
    model, folder = trained(DeepFM(data.num_dense, data.fields, **SMALL[DeepFM]), data), tmp_path / "deepfm-clicks"
    options = {"num_dense": data.num_dense, "name": "deepfm-clicks", "datamodule": data, "data": "clicks"}
    save_pretrained(model, folder, metrics={"test/auc": 0.8125, "test/ne": 0.9}, **options)
    loaded = load_pretrained(folder)
    batch = data.rows("train").take(torch.arange(10))
    with torch.no_grad():
        assert torch.allclose(loaded.logits(batch.dense, batch.sparse), model(batch.dense, batch.sparse), atol=1e-6)
    assert {"README.md", "config.json", "model.safetensors"} < {path.name for path in folder.iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deepfm-clicks"]
    _, head, text = (folder / "README.md").read_text().split("---\n", 2)
    (result,) = yaml.safe_load(head)["model-index"][0]["results"]
    assert result["metrics"][0] == {"type": "roc_auc", "name": "test/auc", "value": 0.8125}
    assert "| test/ne | 0.9000 |" in text
    assert "| user | user |" in text
    with pytest.raises(FileExistsError, match="has files already"):
        save_pretrained(model, folder, **options)
    with pytest.raises(ValueError, match="letters, digits"):
        save_pretrained(model, tmp_path / "other", **{**options, "name": "a\nb"})
    with pytest.raises(PublishedVersionError, match=r"config\.json cannot be read"):
        load_pretrained(tmp_path / "nothing")
    rows = next(folder.glob("rows-*.arrow"))
    rows.write_bytes(rows.read_bytes()[:-8])
    with pytest.raises(PublishedVersionError, match="torn or damaged"):
        load_pretrained(folder)


def test_onnx_when_exported_then_it_computes_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "export_apart", dense._export)
    model = DeepFM(2, {"a": 50, "b": 20}, embedding_dim=4, hidden=(8,))
    export_model(model, tmp_path / "model", num_dense=2)
    published = ModelReader(tmp_path / "model").model
    if importlib.util.find_spec("onnxscript") is None:
        with pytest.raises(ImportError, match=r"extra \[onnx\]"):
            export_onnx(published, tmp_path / "dense.onnx")
        return
    runtime = pytest.importorskip("onnxruntime")
    export_onnx(published, tmp_path / "dense.onnx")
    numbers, sparse = published.encoder.encode([{"dense": [i, 0.5], "a": i, "b": i} for i in range(7)])
    pooled = {path: rows.numpy() for path, rows in published.pooled(sparse).items()}
    session = runtime.InferenceSession(tmp_path / "dense.onnx")
    (logits,) = session.run(["logits"], {"dense": numbers.numpy(), **pooled})
    assert torch.allclose(torch.from_numpy(logits), published.logits(numbers, sparse), atol=1e-6)


class Tied(LogisticRegression):
    """Two names for one parameter."""

    def __init__(self):
        super().__init__(2, {"a": 5})
        self.again = self.first_order.bias

    def forward(self, dense, sparse):
        return super().forward(dense, sparse) + self.again


def test_model_when_it_has_tied_parameters_then_it_is_published(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "export_apart", dense._export)
    model = Tied()
    torch.nn.init.constant_(model.again, 0.5)
    export_model(model, tmp_path, num_dense=2)
    score = ModelReader(tmp_path).predict([{"dense": [0, 0], "a": 1}]).probabilities
    assert score == pytest.approx([torch.ones(()).sigmoid().item()])


needs_litserve = pytest.mark.skipif(
    importlib.util.find_spec("litserve") is None, reason="litserve is not installed (extra [serving])"
)


@pytest.fixture
def port():
    yield free_port()
    let_go()


def ask(port, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def refused(port, body, kind="application/json"):
    """Status and words of an answer that is none."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/predict", data=body, headers={"Content-Type": kind})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=30)
    return error.value.code, json.loads(error.value.read())["detail"]


@needs_litserve
def test_server_when_the_temporary_folder_is_too_long_for_sockets_then_says_what_to_set(monkeypatch, tmp_path):
    from lightning_recsys.serving.server import ScoringAPI, make_server

    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + 71 * "x")
    with pytest.raises(ValueError, match=r"has 76 characters, and the sockets .* allow 75: set TMPDIR"):
        make_server(ScoringAPI(str(tmp_path)))


@needs_litserve
def test_requests_of_one_batch_when_some_cannot_be_scored_then_the_others_are(tmp_path, monkeypatch):
    from lightning_recsys.serving.server import ScoringAPI

    monkeypatch.setattr(export, "export_apart", dense._export)
    model = LogisticRegression(2, {"a": 5})
    with torch.no_grad():
        model.first_order.dense_weight.copy_(torch.tensor([4.0, -4.0]))
    export_model(model, tmp_path, num_dense=2)
    api, asked = ScoringAPI(str(tmp_path)), []
    with monkeypatch.context() as patch:
        patch.setattr(PublishedModel, "predict", lambda model, rows: asked.extend(rows))
        api.setup("cpu")
    api.reader.close()
    assert asked == [{"dense": [0.0, 0.0], "a": 0}], "compiled loops are loaded before the first request"
    huge = {"dense": [3e38, 3e38], "a": 1}  # four times that is infinity, and infinity less infinity is no number
    requests = [{"dense": [0, 0], "a": 1}, {"a": 9}, {"rows": []}, {"rows": [{"dense": [0, 0], "a": 1}, huge]}, {}]
    answers = api.predict(api.batch([api.decode_request(request) for request in requests]))
    answers = [api.encode_response(answer) for answer in answers]
    assert answers[0] == {"version": 1, "probabilities": [0.5]}
    found = [(x.status_code, json.loads(x.body)["detail"]) for x in answers[1:]]
    assert [status for status, _ in found] == [422, 422, 500, 422]
    assert found[2][1] == "row 1: the score by version 1 is nan."


@needs_litserve
def test_server_when_its_settings_cannot_be_then_they_are_named(tmp_path):
    from lightning_recsys.serving.server import ScoringAPI, make_server

    for name in ("stale_after", "max_rows"):
        with pytest.raises(ValueError, match=f"{name} must be a whole number above 0, got 0"):
            ScoringAPI(str(tmp_path), **{name: 0})
    with pytest.raises(ValueError, match=r"max_bytes must be a whole number above 0, got 1\.5"):
        make_server(ScoringAPI(str(tmp_path)), max_bytes=1.5)
    for seconds in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"follow_seconds must be above 0, got {seconds}"):
            ScoringAPI(str(tmp_path), follow_seconds=seconds)
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        make_server(ScoringAPI(str(tmp_path)), workers=0)


def health_of(folder, *, stale_after=3, stale_seconds=60.0):
    """What `/health?stale=503` answers by the notes of workers."""
    from fastapi import FastAPI

    from lightning_recsys.serving.server import _add_routes

    _add_routes(app := FastAPI(), folder, stale_after=stale_after, stale_seconds=stale_seconds)
    (endpoint,) = [route.endpoint for route in app.routes if route.path == "/health"]

    def ask():
        answer = endpoint(stale=503)
        return answer.status_code, json.loads(answer.body)

    return ask


@needs_litserve
def test_health_when_workers_have_looked_at_different_times_then_the_one_that_has_not_for_longest_counts(tmp_path):
    ask, now = health_of(tmp_path), time.time()
    notes = {"1": (10, {}), "2": (50, {}), "3": (20, {"failures": 1, "error": "gone", "seen": now - 20})}
    for worker, (ago, more) in notes.items():
        note = {"version": 2, "created": now, "example": {}} | more
        (tmp_path / f"{worker}.json").write_text(json.dumps(note))
        os.utime(tmp_path / f"{worker}.json", (now - ago, now - ago))
    status, health = ask()
    assert (status, health["status"], health["last_error"]) == (200, "ok", "gone")
    assert 50 <= health["stale_seconds"] < 60
    os.utime(tmp_path / "2.json", (now - 70, now - 70))
    assert ask()[0] == 503
    opens = {"version": 2, "created": now, "example": {}, "failures": 0, "error": None, "seen": now - 70}
    (tmp_path / "2.json").write_text(json.dumps(opens | {"opening": True}))
    status, health = ask()
    assert (status, health["workers"]) == (200, 3)
    assert 20 <= health["stale_seconds"] < 30


@needs_litserve
def test_health_when_the_source_hangs_then_it_is_stale_and_not_while_a_version_is_opened(tmp_path, monkeypatch):
    from lightning_recsys.serving.server import ScoringAPI

    monkeypatch.setattr(export, "export_apart", dense._export)
    model = LogisticRegression(2, {"a": 5})
    export_model(model, tmp_path / "model", num_dense=2)
    api, notes = ScoringAPI(str(tmp_path / "model"), follow_seconds=0.01), tmp_path / "notes"
    notes.mkdir()
    api.status_folder = str(notes)
    api.setup("cpu")
    ask, goes_on, reader = health_of(notes, stale_seconds=0.2), threading.Event(), api.reader

    def wait_for(wanted):
        deadline = time.monotonic() + 20
        while not wanted():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def slow(call):
        return lambda *arguments: goes_on.wait(20) and call(*arguments)

    try:
        wait_for(lambda: list(notes.glob("*.json")))
        assert ask()[1]["status"] == "ok"
        with monkeypatch.context() as patch:
            patch.setattr(reader.folder, "counting", slow(reader.folder.counting))
            wait_for(lambda: ask()[0] == 503)
            assert ask()[1]["last_error"].startswith("a look for a new version has not ended for ")
            goes_on.set()
            wait_for(lambda: ask()[0] == 200)
        goes_on.clear()
        with monkeypatch.context() as patch:
            patch.setattr(reader, "_open", slow(reader._open))
            export_model(model, tmp_path / "model", num_dense=2)
            wait_for(lambda: '"opening": true' in next(notes.glob("*.json")).read_text())
            time.sleep(0.4)
            assert ask()[1]["status"] == "ok"
            goes_on.set()
            wait_for(lambda: ask()[1]["version"] == 2)
        wait_for(lambda: "opening" not in next(notes.glob("*.json")).read_text())
    finally:
        goes_on.set()
        reader.close()


RECIPE = os.path.join(os.path.dirname(__file__), "../../../recipes/serve.py")


def start_server(folder, *overrides):
    """A server as a script starts it in the background, where it gets no SIGINT; it writes into ``log``."""
    command = [sys.executable, RECIPE, f"url={folder / 'model'}", *overrides]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command],
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=folder,
        )


def is_group_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@needs_litserve
def test_server_when_a_new_version_is_published_then_its_answer_changes(tmp_path, monkeypatch, port):
    monkeypatch.setattr(export, "export_apart", dense._export)
    model = LogisticRegression(2, {"a": 5})
    export_model(model, tmp_path / "model", num_dense=2)
    limits = ("max_rows=10", "max_bytes=200000")
    server = start_server(tmp_path, f"port={port}", "follow_seconds=0.1", "stale_after=2", *limits)
    try:
        deadline, example = time.monotonic() + 100, None
        while example is None:
            assert server.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            try:
                example = ask(port, "/example")
            except OSError:  # it does not listen, or has no version, yet
                time.sleep(0.1)
        assert ask(port, "/predict", example) == {"version": 1, "probabilities": [0.5]}
        with torch.no_grad():
            model.first_order.bias.fill_(1.0)
        export_model(model, tmp_path / "model", num_dense=2)
        while ask(port, "/health")["version"] == 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        answer = ask(port, "/predict", {"rows": [*example["rows"], {"dense": [0, 0], "a": [1, 2]}]})
        assert answer["version"] == 2
        assert answer["probabilities"] == pytest.approx([torch.ones(()).sigmoid().item()] * 2)
        assert refused(port, b'{"rows": [{"a": 9}]}') == (422, "row 0: 'a' takes ids in [0, 5), got 9.")
        wrong = (
            b"{",
            b"",
            b"[NaN]",
            b"null",
            b"\xff\xfe",
            b'{"a": "\xff"}',
            b"[" * 100_000,
            b'{"a": 1' + b"0" * 5000 + b"}",
        )
        for body in wrong:
            assert refused(port, body)[0] == 422
            assert "a request is a JSON object" in refused(port, body)[1]
        assert refused(port, json.dumps(example).encode(), kind="text/plain")[0] == 422
        assert refused(port, json.dumps({"rows": example["rows"] * 11}).encode())[1].startswith(
            "a request has at most 10 rows, got 11: "
        )
        too_long = json.dumps({"rows": example["rows"], "more": "x" * 200_000}).encode()
        assert refused(port, too_long)[0] == 413
        assert "at most 200000 bytes" in refused(port, too_long)[1]
        health = ask(port, "/health?stale=503")
        assert (health["status"], health["version"], health["workers"]) == ("ok", 2, 1)
        assert health["age_seconds"] >= 0
        assert health["last_error"] is None
        (tmp_path / "model").rename(tmp_path / "elsewhere")
        while (health := ask(port, "/health"))["status"] == "ok":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert (health["status"], health["version"]) == ("stale", 2)
        assert health["stale_seconds"] > 0.1
        assert "it is not there any more" in health["last_error"]
        with pytest.raises(urllib.error.HTTPError) as unhealthy:
            ask(port, "/health?stale=503")
        assert unhealthy.value.code == 503
        assert json.loads(unhealthy.value.read())["status"] == "stale"
        assert ask(port, "/predict", example)["version"] == 2
        assert "looks for a new version have failed in a row" in (tmp_path / "log").read_text()
        (tmp_path / "elsewhere").rename(tmp_path / "model")
        while ask(port, "/health")["status"] == "stale":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(server.pid, signal.SIGTERM)  # to the one process that whoever started it knows
        server.wait(60)
        while is_group_alive(server.pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        if is_group_alive(server.pid):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@needs_litserve
@pytest.mark.parametrize("who", ["server", "worker"])
def test_server_when_it_or_a_worker_is_killed_then_none_of_its_processes_stays(tmp_path, monkeypatch, port, who):
    monkeypatch.setattr(export, "export_apart", dense._export)
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # short: sockets lie in it, whose paths have 107 characters at most
    monkeypatch.setenv("TMPDIR", str(temporary))
    export_model(LogisticRegression(2, {"a": 5}), tmp_path / "model", num_dense=2)
    server = start_server(tmp_path, f"port={port}")
    try:
        deadline = time.monotonic() + 100
        while " answers at http://127.0.0.1:" not in (tmp_path / "log").read_text():
            assert server.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (note,) = temporary.glob("lightning-recsys-serving-*/*.json")
        os.kill(server.pid if who == "server" else int(note.stem), signal.SIGKILL)
        assert server.wait(60) == (-signal.SIGKILL if who == "server" else 1)
        while is_group_alive(server.pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not list(temporary.glob("lightning-recsys-serving-*"))
        if who == "worker":
            log = (tmp_path / "log").read_text()
            assert "A process that scores requests was ended by SIGKILL, as the system does when memory" in log
            assert "Traceback" not in log
    finally:
        if is_group_alive(server.pid):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        shutil.rmtree(temporary)
