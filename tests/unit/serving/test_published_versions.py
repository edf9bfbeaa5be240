"""Versions: a chain of increments has the bits of the rows, and whatever is wrong with one changes nothing."""

import dataclasses
import json
import math
import os
import shutil
import sys
import threading
from unittest import mock

import pytest
import torch
from kills_script import kill_everywhere
from published import FEATURES, Sums, Trained, save_program

from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.errors import PublishedVersionError
from lightning_recsys.launchers.processes import fork_server_context
from lightning_recsys.serving import ModelReader, export_model, list_versions, roll_back
from lightning_recsys.serving.cli import main
from lightning_recsys.serving.files import VersionFolder
from lightning_recsys.serving.manifest import Link, Manifest, current_to_json, digest_of
from lightning_recsys.serving.publishing import claims
from lightning_recsys.stores import DynamicRows

IDS = torch.arange(50)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return save_program(tmp_path_factory.mktemp("program") / "p.pt2")


@pytest.fixture
def make(program, tmp_path):
    made = []

    def make(name="model", **options):
        made.append(Trained(program, tmp_path / f"stores-{len(made)}", tmp_path / name, **options))
        return made[-1]

    yield make
    for trained in made:
        trained.close()


def assert_same(trained, model, ids=IDS):
    for table in ("a", "b"):
        some = ids[ids < 50] if table == "b" else ids
        assert torch.equal(model.rows_of("embeddings", table, some), trained.rows(table, some).float())
    assert torch.equal(model.weights["weight"], trained.model.weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_increments_when_applied_then_rows_have_the_bits_of_the_stores_and_only_changed_ones_are_written(
    make, tmp_path, dtype
):
    trained = make(dtype=dtype)
    base = trained.publish()
    assert base.is_base
    (collection,) = json.loads(base.to_json())["collections"]
    fields = {"name", "num_embeddings", "embedding_dim", "feature_names", "pooling", "init_std"}  # that readers know
    assert {*collection["tables"][0]["config"]} == fields
    reader = ModelReader(tmp_path / "model")
    for step in range(4):
        trained.train([step, 7, 7, 20])
        manifest = trained.publish()
        assert not manifest.is_base
        assert [x.num_rows for x in manifest.collections[0].tables] == [3 - (step == 7)] * 2
        assert reader.refresh()
        assert_same(trained, reader.model)
    assert not reader.refresh()
    assert ModelReader(tmp_path / "model").version == reader.version == 5
    assert_same(trained, ModelReader(tmp_path / "model").model, torch.arange(300))
    assert [x.num_rows for x in trained.publish().collections[0].tables] == [0, 0]


def test_rows_when_they_come_and_go_then_increments_equal_the_stores_and_a_base_of_the_same_cut(make, tmp_path):
    trained = make(dynamic=DynamicRows(admission=2, expire_after=6))
    trained.train([1, 2, 3])
    trained.publish()
    reader = ModelReader(tmp_path / "model")
    far = torch.tensor([2**40, 2**41 + 5, 77])
    gone = 0
    for step in range(12):
        trained.train([1, 1 + step % 3, 30 + step // 2])
        if step == 5:
            trained.backend.dynamic.write("a", "weight", far, torch.randn(3, 8))
        if step % 3 == 2:
            manifest = trained.publish()
            gone += sum(x.num_gone for x in manifest.collections[0].tables)
            reader.refresh()
            assert_same(trained, reader.model, torch.cat([IDS, far, far + 1]))
    assert gone
    untrained = torch.tensor([2**47 + 11])
    assert reader.model.rows_of("embeddings", "a", untrained).abs().sum()
    trained.writer._last_manifest = None  # as of a writer that has just begun: its first version is a base
    assert trained.publish().is_base
    other = ModelReader(tmp_path / "model")
    assert other.model.manifest.is_base
    for table, ids in trained.backend.dynamic.live_ids().items():
        every = torch.cat([ids, untrained]) if table == "a" else ids
        rows = [x.model.rows_of("embeddings", table, every) for x in (reader, other)]
        assert torch.equal(*rows)
        assert torch.equal(rows[0], trained.rows(table, every))


def test_logits_when_asked_for_then_they_are_those_of_the_model(make, tmp_path):
    trained = make()
    trained.publish()
    trained.train([3, 4])
    trained.publish()
    reader = ModelReader(tmp_path / "model")
    dense, sparse = torch.randn(4, 2), SparseFeatures(FEATURES, torch.randint(50, (12,)))
    bags = SparseFeatures(FEATURES, torch.randint(50, (9,)), lengths=torch.tensor([1, 0, 2, 1, 0, 2, 1, 0, 0, 2, 0, 0]))
    for features in (sparse, bags):
        with torch.no_grad():
            assert torch.allclose(reader.model.logits(dense, features), trained.model(dense, features), atol=1e-6)
    rows = [{"x": 3, "y": [4, 5], "z": 0, "dense": [0.5, 1]}, {"x": 1, "y": 2, "z": 3, "dense": [0, 0]}]
    assert len(reader.predict(rows).probabilities) == 2
    assert reader.predict([]).probabilities == []
    for wrong, message in (
        ({"x": 3}, "'y' takes ids"),
        ({**rows[0], "x": 50}, "'x' takes ids"),
        ({**rows[0], "dense": [1]}, "2 finite"),
    ):
        with pytest.raises(ValueError, match=message):
            reader.predict([wrong])


def test_compaction_when_due_then_readers_old_and_new_have_the_same_rows_and_old_versions_go(
    make, tmp_path, monkeypatch
):
    trained = make(keep=2, max_increments=3, dynamic=DynamicRows(expire_after=4))
    trained.train([1, 2])
    trained.publish()
    follower, compact = ModelReader(tmp_path / "model"), trained.writer._compact
    # It has every version open before it is compacted, as where that takes long.
    monkeypatch.setattr(trained.writer, "_compact", lambda *arguments: (follower.refresh(), compact(*arguments)))
    for step in range(7):
        trained.train([step % 5, 40])
        manifest = trained.publish()
        assert not manifest.is_base
        follower.refresh()
        new = ModelReader(tmp_path / "model")
        assert new.version == follower.version
        for reader in (follower, new):
            assert_same(trained, reader.model)
        # Who follows for weeks maps no more files than who has just come.
        assert len(follower.model.rows["embeddings"]._files) == len(new.model.rows["embeddings"]._files)
    kept = sorted(int(x.name) for x in (tmp_path / "model" / "versions").iterdir())
    assert len(kept) <= 5
    assert kept[-1] == new.version


def publish_number(trained, number):
    """Let every row, and the weight, be a number: the logit of a request then tells of which version each was."""
    for table, rows in (("a", 300), ("b", 50)):
        trained.backend.write_rows(table, "weight", 0, torch.full((rows, 8), float(number)))
    with torch.no_grad():
        trained.model.weight.fill_(float(number))
    trained.publish()


def numbers(folder):
    return sorted(int(x.name) for x in (folder / "versions").iterdir())


def test_retention_when_a_manifest_cannot_be_read_for_a_moment_then_no_base_is_lost(make, tmp_path, monkeypatch):
    trained = make(keep=1)
    trained.publish()
    trained.train([1])
    trained.publish()
    find = trained.folder.find

    def fail(version):
        if version == 3:
            raise PublishedVersionError("model/versions/3", "its manifest is missing (timed out)")
        return find(version)

    trained.restart()  # version 3 will be a base, and 4 build on it
    monkeypatch.setattr(trained.folder, "find", fail)
    trained.publish()
    trained.train([2])
    monkeypatch.setattr(trained.folder, "manifest", lambda link: find(link.version)[1])
    trained.publish()
    assert numbers(tmp_path / "model") == [1, 2, 3, 4]
    monkeypatch.undo()
    trained.publish()
    assert numbers(tmp_path / "model") == [3, 4, 5]
    assert_same(trained, ModelReader(tmp_path / "model").model)


def test_retention_when_another_run_begins_then_it_removes_versions_of_its_own_and_runs_past_keep_runs(make, tmp_path):
    trained = make(keep=1)
    for number in range(3):
        trained.restart(run=f"{number:032}", keep_runs=2 if number == 2 else None)
        trained.publish()
        trained.train([number])
        trained.publish()
        trained.restart()  # it is resumed, and begins with a base
        trained.publish()
        trained.publish()
        expected = {0: [3, 4], 1: [3, 4, 7, 8], 2: [7, 8, 11, 12]}
        assert numbers(tmp_path / "model") == expected[number]
    current, manifests = list_versions(tmp_path / "model")
    assert current.version == 12
    assert [int(x.run) for x in manifests] == [1, 1, 2, 2]


def test_version_when_rolled_back_to_then_readers_stay_with_it_until_it_is_released(make, tmp_path, capsys):
    trained, folder = make(keep=5), tmp_path / "model"
    for step in range(3):
        publish_number(trained, step + 1)
    reader, pinned = ModelReader(folder), ModelReader(folder, version=1)
    assert main([str(folder), "--roll-back", "2"]) == 0
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()] == [
        ["1", "base", mock.ANY],
        ["*", "2", "increment"],
        ["3", "increment", mock.ANY],
        ["Version", "2", "counts"],
    ]
    assert main([str(folder), "--roll-back", "7"]) == 1
    assert "versions/7: its manifest is missing" in capsys.readouterr().err
    assert reader.refresh()
    assert reader.version == ModelReader(folder).version == 2
    assert reader.model.weights["weight"] == 2
    trained.restart(keep=1)
    for step in range(4, 7):
        publish_number(trained, step)
    assert not reader.refresh()  # what was gone back to counts on, and stays with what it builds on
    assert numbers(folder) == [1, 2, 4, 5, 6]
    assert main([str(folder)]) == 0
    assert "Version 2 counts until it is released: " in capsys.readouterr().out
    assert main([str(folder), "--release"]) == 0
    assert [line[0] for line in capsys.readouterr().out.splitlines()] == [" ", " ", " ", " ", "*"]
    assert main([str(folder), "--release"]) == 0
    assert "no version of " in capsys.readouterr().err
    assert reader.refresh()
    assert reader.version == 6
    assert reader.model.weights["weight"] == 6
    assert not pinned.refresh()
    assert pinned.version == 1
    with pytest.raises(PublishedVersionError, match="versions/9: its manifest is missing"):
        roll_back(folder, 9)
    (folder / "versions" / "1" / "model.safetensors").write_bytes(b"")
    with pytest.raises(PublishedVersionError, match="torn or damaged"):
        roll_back(folder, 1)
    assert trained.folder.counting().version == 6
    (folder / "held.json").write_bytes(b"{")
    with pytest.raises(PublishedVersionError, match=r"held\.json: is damaged"):
        reader.refresh()
    publish_number(trained, 7)
    assert numbers(folder)[-2:] == [6, 7]  # nothing is removed while nobody knows what is held


def test_model_when_it_has_diverged_then_it_is_not_published(make, tmp_path):
    trained = make()
    publish_number(trained, 1)
    trained.backend.write_rows("b", "weight", 7, torch.full((1, 8), float("inf")))
    with pytest.raises(FloatingPointError, match="rows of table 'b' are not finite"):
        trained.publish()
    for wrong in ("nan", "inf", "-inf"):
        with pytest.raises(FloatingPointError, match=f"weight of the model has {wrong}: it has diverged"):
            publish_number(trained, float(wrong))
    assert ModelReader(tmp_path / "model").version == 1
    assert numbers(tmp_path / "model") == [1]
    publish_number(trained, 2)
    assert_same(trained, ModelReader(tmp_path / "model").model)
    trained.skeleton = dataclasses.replace(trained.skeleton, buffers=frozenset({"weight"}))  # as of a mask
    for number in (float("-inf"), float("nan")):
        with torch.no_grad():
            trained.model.weight.fill_(number)
        if math.isinf(number):
            assert ModelReader(tmp_path / "model", version=trained.publish().version).model.weights["weight"] == number
    with pytest.raises(FloatingPointError, match="weight of the model has nan"):
        trained.publish()


def as_stored(rows, row_format):
    """By torch alone; 3.3895e38 is the largest finite number of bf16."""
    if row_format == "bf16":
        return rows.bfloat16().float().nan_to_num(posinf=3.3895313892515355e38, neginf=-3.3895313892515355e38)
    scale = rows.abs().amax(1, keepdim=True) / 127
    return (rows / scale).round() * scale


@pytest.mark.parametrize("row_format", ["bf16", "int8"])
@pytest.mark.parametrize("dynamic", [None, DynamicRows(expire_after=4)], ids=["all rows", "rows that come and go"])
def test_rows_when_packed_then_they_are_rounded_once_through_increments_and_compactions(
    make, tmp_path, row_format, dynamic
):
    trained = make(max_increments=2, dynamic=dynamic)
    trained.skeleton = dataclasses.replace(trained.skeleton, rows=row_format)
    trained.train([1, 2, 3])
    if dynamic is None:
        trained.backend.write_rows("b", "weight", 9, torch.full((1, 8), -3.4e38))
    trained.publish()
    follower = ModelReader(tmp_path / "model")
    for step in range(4):
        trained.train([4 + step, 7])
        trained.publish()
        follower.refresh()
    kinds = [x.kind for x in list_versions(tmp_path / "model")[1]]
    assert kinds == ["base", "increment", "increment", "base", "increment", "increment", "base"]
    for reader in (follower, ModelReader(tmp_path / "model")):
        for table in ("a", "b"):
            rows = reader.model.rows_of("embeddings", table, IDS)
            expected = as_stored(trained.rows(table, IDS), row_format)
            assert torch.allclose(rows, expected, rtol=1e-6, atol=0), (rows - expected).abs().max()
    ids = torch.randint(50, (12,))
    lengths = torch.tensor([2, 1, 1, 0, 3, 1, 1, 1, 0, 0, 1, 1])
    bags = SparseFeatures(FEATURES, ids, lengths=lengths, weights=torch.rand(12))
    pooled = follower.model.rows["embeddings"].lookup_frozen(bags)
    tables = {name: as_stored(trained.rows(name, IDS), row_format) for name in ("a", "b")}
    expected, place = torch.zeros(4, 3, 8), 0
    for bag, length in enumerate(bags.bag_lengths().tolist()):
        for number in range(place, place + length):
            row = tables["b" if bag >= 8 else "a"][ids[number]]
            expected[bag % 4, bag // 4] += bags.weights[number] * row
        place += length
    assert torch.allclose(pooled, expected, atol=1e-5)


def test_base_when_rows_are_packed_then_it_has_fewer_bytes(make, tmp_path):
    sizes = {}
    for row_format in ("float32", "bf16", "int8"):
        trained = make(row_format)
        trained.skeleton = dataclasses.replace(trained.skeleton, rows=row_format)
        manifest = trained.publish()
        sizes[row_format] = sum(entry.size for name, entry in manifest.files.items() if name.startswith("rows"))
    assert sizes["float32"] - sizes["bf16"] == pytest.approx(350 * 16, abs=128)  # Arrow pads to 64 bytes
    assert sizes["float32"] - sizes["int8"] == pytest.approx(350 * (32 - 12), abs=128)


def test_small_tables_when_all_of_them_change_then_increments_are_not_compacted(make, tmp_path):
    trained = make(compact_share=0.1, max_increments=100)
    for number in range(6):
        publish_number(trained, number)
    assert [x.kind for x in list_versions(tmp_path / "model")[1]] == ["base", *["increment"] * 5]


def test_publication_when_it_fails_then_it_leaves_no_files(tmp_path):
    folder = VersionFolder(tmp_path)
    with pytest.raises(OSError, match="No space"), folder.writing(1) as path:  # noqa: PT012 - it has to be within
        (path / "rows-0-0.arrow").write_bytes(b"half")
        raise OSError(28, "No space left on device")
    assert folder.versions() == []


def rewrite(folder, version, **changes):
    """Change a manifest, and let everything that names it follow: the digests are right."""
    path = folder / "versions" / str(version) / "manifest.json"
    plain = json.loads(path.read_text())
    plain.update(changes)
    data = json.dumps(plain).encode()
    path.write_bytes(data)
    (folder / "current.json").write_bytes(current_to_json(Link(version, digest_of(data))))


def _missing(folder):
    shutil.rmtree(folder / "versions" / "3")


def _torn(folder):
    path = folder / "versions" / "4" / "rows-0-0.arrow"
    path.write_bytes(path.read_bytes()[:-8])


def _repeated(folder):
    shutil.rmtree(folder / "versions" / "4")
    shutil.copytree(folder / "versions" / "3", folder / "versions" / "4")


def _reordered(folder):
    versions = folder / "versions"
    (versions / "3").rename(versions / "x")
    (versions / "2").rename(versions / "3")
    (versions / "x").rename(versions / "2")


def _foreign(folder):
    rewrite(folder, 4, lineage="0" * 32)


def _other_chain(folder):
    other = folder.parent / "other" / "versions" / "3"
    shutil.rmtree(folder / "versions" / "3")
    shutil.copytree(other, folder / "versions" / "3")


def _crossing(folder):
    manifest = json.loads((folder / "versions" / "4" / "manifest.json").read_text())
    table = manifest["collections"][0]["tables"][0]
    manifest["files"]["../../../secret.arrow"] = manifest["files"].pop(table["file"])
    table["file"] = "../../../secret.arrow"
    rewrite(folder, 4, files=manifest["files"], collections=manifest["collections"])


def _link(folder):
    path = folder / "versions" / "4" / "rows-0-0.arrow"
    (folder.parent / "outside.arrow").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(folder.parent / "outside.arrow")


@pytest.mark.parametrize("change", [_missing, _torn, _repeated, _reordered, _foreign, _other_chain, _crossing, _link])
def test_version_when_broken_then_it_is_refused_by_name_and_nothing_changes(make, tmp_path, change):
    trained, other = make(), make("other")
    for x in (trained, other):
        x.publish()
        for step in range(2):
            x.train([step])
            x.publish()
    trained.train([9])
    trained.publish()
    # The reader opens version 1; versions 2 to 4 are what it is to follow.
    early = json.loads((tmp_path / "model" / "versions" / "2" / "manifest.json").read_text())["previous"]
    current = (tmp_path / "model" / "current.json").read_bytes()
    (tmp_path / "model" / "current.json").write_bytes(current_to_json(Link(**early)))
    reader = ModelReader(tmp_path / "model")
    (tmp_path / "model" / "current.json").write_bytes(current)
    before = reader.model
    change(tmp_path / "model")
    with pytest.raises(PublishedVersionError, match=r"versions/\d"):
        reader.refresh()
    assert reader.model is before
    assert reader.version == 1


def test_manifest_when_fuzzed_then_nothing_changes(make, tmp_path):
    trained = make(dynamic=DynamicRows())
    trained.train([1])
    trained.publish()
    trained.train([2])
    trained.publish()
    reader = ModelReader(tmp_path / "model")
    folder = tmp_path / "model"
    data = json.loads((folder / "versions" / "2" / "manifest.json").read_text())
    values = [None, -1, 2**70, "..", "/etc/passwd", [], {}, 1.5, True, "x" * 10_000]
    paths = list(_paths(data))
    generator = torch.Generator().manual_seed(0)
    before, refused = reader.model, 0
    for number in torch.randint(len(paths) * len(values), (150,), generator=generator).tolist():
        path, value = paths[number // len(values)], values[number % len(values)]
        if path[0] in ("position", "cut", "created", "previous"):
            continue
        plain = json.loads(json.dumps(data))
        place = plain
        for key in path[:-1]:
            place = place[key]
        if place[path[-1]] == value:
            continue
        place[path[-1]] = value
        encoded = json.dumps(plain).encode()
        (folder / "versions" / "2" / "manifest.json").write_bytes(encoded)
        (folder / "current.json").write_bytes(current_to_json(Link(2, digest_of(encoded))))
        fresh = None
        try:
            fresh = ModelReader(folder)
        except PublishedVersionError:
            refused += 1
        assert fresh is None or path[-1] in ("init_std", "pooling", "seed", "first_key", "key_step", "num_dense"), path
    assert refused > 60
    assert reader.model is before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("created", float("nan")),
        ("created", True),
        ("position", [1]),
        ("cut", 3),
        ("collections", []),
        ("rows", "int8"),
    ],
)
def test_manifest_when_hostile_then_it_is_refused_by_name(make, tmp_path, key, value):
    make().publish()
    rewrite(tmp_path / "model", 1, **{key: value})
    with pytest.raises(PublishedVersionError, match="versions/1: "):
        ModelReader(tmp_path / "model")


@pytest.mark.parametrize("dim", [2**31, 2**70])
def test_manifest_when_its_tables_are_wider_than_any_then_it_is_refused_by_name(make, tmp_path, dim):
    (collection,) = json.loads(json.dumps(dataclasses.asdict(make().publish())["collections"]))
    for table in collection["tables"]:
        table["config"]["embedding_dim"] = dim
    rewrite(tmp_path / "model", 1, collections=[collection])
    with pytest.raises(PublishedVersionError, match=r"versions/1: .*too large"):
        ModelReader(tmp_path / "model")


def _paths(plain, here=()):
    items = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for key, value in items:
        yield (*here, key)
        yield from _paths(value, (*here, key))


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b'{"format": 2}', b"\xff", b"[" * 100_000, b'{"format": 2, "version": 0, "digest": ""}'],
)
def test_pointer_when_it_is_none_then_it_is_refused(make, tmp_path, data):
    trained = make()
    trained.publish()
    reader = ModelReader(tmp_path / "model")
    (tmp_path / "model" / "current.json").write_bytes(data)
    with pytest.raises(PublishedVersionError, match="is damaged"):
        reader.refresh()
    with pytest.raises(ValueError):  # noqa: PT011 - any
        Manifest.from_json(data)


def test_requests_during_swaps_then_none_fails_and_none_mixes_two_versions(make, tmp_path):
    trained = make(keep=2, max_increments=4)

    publish_number(trained, 1)
    reader = ModelReader(tmp_path / "model")
    dense, sparse = torch.zeros(1, 2), SparseFeatures(FEATURES, torch.tensor([3, 4, 5]))
    seen, wrong, errors, done = set(), [], [], threading.Event()

    def ask(count):
        asked = 0
        try:
            while asked < count or (len(seen) < 3 and not errors):  # however long a version takes to be written
                asked += 1
                model = reader.model
                value = model.logits(dense, sparse).item() / 24
                seen.add(round(value**0.5))
                if round(value**0.5) ** 2 != value:
                    wrong.append(value)
        except Exception as error:
            errors.append(error)

    def swap():
        version = 1
        try:
            while not done.is_set():
                version += 1
                publish_number(trained, version)
                reader.refresh()
        except Exception as error:
            errors.append(error)

    swapper = threading.Thread(target=swap)
    askers = [threading.Thread(target=ask, args=(2500,)) for _ in range(4)]
    for thread in (swapper, *askers):
        thread.start()
    for thread in askers:
        thread.join()
    done.set()
    swapper.join()
    assert not errors
    assert not wrong
    assert len(seen) > 2


def test_remote_folder_when_read_then_files_are_kept_by_their_digests(program, tmp_path):
    import fsspec

    files = fsspec.filesystem("memory")
    trained = Trained(program, tmp_path / "stores", "memory://model", keep=2)
    try:
        trained.publish()
        trained.train([1, 2])
        trained.publish()
        reader = ModelReader("memory://model", cache=tmp_path / "cache")
        assert reader.version == 2
        assert_same(trained, reader.model)
        names = {path.name for path in (tmp_path / "cache").iterdir()}
        trained.train([3])
        trained.publish()
        reader.refresh()
        assert_same(trained, reader.model)
        assert names < {path.name for path in (tmp_path / "cache").iterdir()}
        assert trained.folder.versions() == [1, 2, 3]
        for path in (tmp_path / "cache").iterdir():  # two hours later
            os.utime(path, (1, 1))
        (tmp_path / "cache" / f"{'0' * 64}.arrow").touch()
        os.utime(tmp_path / "cache" / f"{'0' * 64}.arrow", (1, 1))
        trained.train([4])
        trained.publish()
        reader.refresh()
        assert names < {path.name for path in (tmp_path / "cache").iterdir()}  # of the base and of all that follows
        assert not (tmp_path / "cache" / f"{'0' * 64}.arrow").exists()
        for path in (tmp_path / "cache").iterdir():
            path.write_bytes(bytes(path.stat().st_size))  # as after a loss of power
        assert_same(trained, ModelReader("memory://model", cache=tmp_path / "cache").model)
    finally:
        trained.close()
        files.rm("model", recursive=True)


def test_remote_folder_when_two_publish_then_the_one_that_lives_stays_and_a_dead_one_is_followed(tmp_path, monkeypatch):
    import fsspec

    for name, seconds in (("RENEW", 0.01), ("WATCH", 60.0), ("LOOK", 0.3), ("SETTLE", 0.01)):
        monkeypatch.setattr(claims, f"{name}_SECONDS", seconds)
    files, link = fsspec.filesystem("memory"), Link(1, "0" * 64)
    first, second = VersionFolder("memory://claimed"), VersionFolder("memory://claimed")
    try:
        with first.locked("run 1"):
            with pytest.raises(ValueError, match=r"memory://claimed: run 1 \(process \d+ on .*publishes there"):
                second.locked("run 2").__enter__()
            first.set_current(link)
        monkeypatch.setattr(claims, "RENEW_SECONDS", 600.0)  # it stands still
        monkeypatch.setattr(claims, "WATCH_SECONDS", 1.0)
        with first.locked("run 1"), second.locked("run 2"):
            with pytest.raises(PublishedVersionError, match=r"versions/1: .*run 2 \(process"):
                first.set_current(link)
            second.set_current(link)
        assert not files.exists("memory://claimed/publisher.json")
    finally:
        files.rm("claimed", recursive=True)


def test_folder_when_nothing_is_published_then_it_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing was published"):
        ModelReader(tmp_path)


def test_publisher_when_killed_at_every_step_then_the_last_whole_version_opens_and_the_next_run_goes_on(
    program, tmp_path
):
    context = fork_server_context()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=kill_everywhere, args=(tmp_path, program, sender))
    process.start()
    sender.close()
    with receiver:
        assert receiver.recv() > 20
    process.join(20)
    assert process.exitcode == 0


def test_programs_when_opened_by_several_threads_then_none_disturbs_another(make, tmp_path):
    trained, readers = make(), []
    trained.publish()
    threads = [threading.Thread(target=lambda: readers.append(ModelReader(tmp_path / "model"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reader.version for reader in readers] == [1] * 4


def test_command_when_nothing_was_published_then_says_so(tmp_path, capsys):
    assert main([str(tmp_path / "nosuch")]) == 1
    assert "nothing was published in" in capsys.readouterr().err


def test_command_when_a_package_for_the_url_is_missing_then_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert main(["gs://bucket/model"]) == 1
    assert "gcsfs" in capsys.readouterr().err


@pytest.mark.parametrize("count", [0, -1, 2.5, True])
def test_export_when_no_run_is_to_stay_then_is_refused_and_nothing_is_removed(make, tmp_path, count):
    make().publish()
    with pytest.raises(ValueError, match=f"keep_runs must be a whole number above 0, got {count}"):
        export_model(Sums(), tmp_path / "model", num_dense=2, keep_runs=count)
    assert numbers(tmp_path / "model") == [1]


def test_rows_when_ids_are_beyond_their_table_then_are_refused(make, tmp_path):
    trained = make()
    trained.publish()
    model = ModelReader(tmp_path / "model").model
    assert torch.equal(model.rows_of("embeddings", "a", torch.tensor([299])), trained.rows("a", torch.tensor([299])))
    for wrong in (300, -1, 10**12):
        with pytest.raises(IndexError, match=r"rows must be in \[0, 300\)"):
            model.rows_of("embeddings", "a", torch.tensor([0, wrong]))
    with pytest.raises(KeyError, match=r"no table 'c'; there are \['a', 'b'\]"):
        model.rows_of("embeddings", "c", torch.tensor([0]))
