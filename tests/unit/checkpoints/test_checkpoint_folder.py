"""Folder checkpoints of one process: what is written comes back, and what is half written does not count."""

import io
import itertools
import json
import os
import pickle
import resource
import shutil
import zlib
from contextlib import nullcontext

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from fsspec.implementations.memory import MemoryFileSystem
from lightning_fabric.utilities import cloud_io
from pytorch_lightning.core import saving
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_recsys.checkpoints import (
    FolderCheckpointIO,
    ReadsFolders,
    StoredTensor,
    files,
    folder,
    is_folder,
    read_checkpoint,
    read_description,
    read_extras,
    read_stored,
    save_folder,
    stored,
    to_file,
    to_folder,
)
from lightning_recsys.checkpoints.cli import main
from lightning_recsys.checkpoints.files import Stretch
from lightning_recsys.checkpoints.manifest import SavedChunk, _check_cover
from lightning_recsys.errors import CheckpointNotWrittenError, DamagedCheckpointError
from lightning_recsys.strategies import ForkserverDDPStrategy

ROWS = torch.arange(30.0).view(10, 3)


def in_store(rows, *, rank=0, world_size=1):
    return StoredTensor(
        shape=rows.shape,
        dtype=rows.dtype,
        read=lambda first, count: rows[first : first + count],
        write=lambda first, values: rows[first : first + len(values)].copy_(values),
        rank=rank,
        world_size=world_size,
    )


def checkpoint(step=7):
    return {
        "state_dict": {"layer.weight": torch.ones(2, 2), "table.weight": in_store(ROWS), "extra": {"notes": [1, 2]}},
        "global_step": step,
        "loops": {"fit_loop": {}},
    }


def killed(*_, **__):
    raise KeyboardInterrupt


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "last.ckpt"
    save_folder(path, checkpoint(), extras={"replica": torch.zeros(2)})
    return path


def test_checkpoint_when_read_then_dense_part_and_the_rest_are_back(saved):
    read = read_checkpoint(saved, without={"table.weight"})
    assert read.keys() == {"state_dict", "global_step", "loops"}
    assert (read["global_step"], read["loops"]) == (7, {"fit_loop": {}})
    assert read["state_dict"].keys() == {"layer.weight", "extra"}
    assert torch.equal(read["state_dict"]["layer.weight"], torch.ones(2, 2))
    assert read["state_dict"]["extra"] == {"notes": [1, 2]}
    assert torch.equal(read_extras(saved, 0)["replica"], torch.zeros(2))
    assert read_extras(saved, 1) is None


def test_checkpoint_when_it_is_the_present_folder_then_is_read(saved, monkeypatch):
    monkeypatch.chdir(saved)
    assert is_folder(".")
    assert read_checkpoint(".")["global_step"] == 7


def test_description_when_read_then_no_tensor_of_the_state_dict_is(saved):
    read = read_description(saved)
    assert (read["global_step"], read["loops"]) == (7, {"fit_loop": {}})
    assert read["state_dict"] == {"extra": {"notes": [1, 2]}}


def test_whole_state_dict_when_read_then_has_the_rows(saved):
    assert torch.equal(read_checkpoint(saved)["state_dict"]["table.weight"], ROWS)


@pytest.mark.parametrize("world_size", [1, 2, 3, 11])
def test_rows_when_read_by_any_number_of_processes_then_each_brings_its_share(saved, world_size):
    rows = torch.zeros(10, 3)
    for rank in range(world_size):
        read_stored(saved, {"table.weight": in_store(rows, rank=rank, world_size=world_size)})
    assert torch.equal(rows, ROWS)


@pytest.mark.parametrize(("block_bytes", "world_size"), [(1, 1), (24, 2), (36, 3), (1 << 20, 4)])
def test_blocks_when_dealt_out_then_every_row_is_one_processs(monkeypatch, block_bytes, world_size):
    monkeypatch.setattr(stored, "BLOCK_BYTES", block_bytes)
    blocks = [
        block for rank in range(world_size) for block in in_store(ROWS, rank=rank, world_size=world_size).blocks()
    ]
    assert sorted(row for first, count in blocks for row in range(first, first + count)) == list(range(10))


def test_rows_when_saved_in_small_blocks_then_any_other_blocks_read_them(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "BLOCK_BYTES", 24)  # two rows
    save_folder(tmp_path / "x.ckpt", checkpoint())
    monkeypatch.setattr(stored, "BLOCK_BYTES", 36)  # three
    rows = torch.zeros(10, 3)
    read_stored(tmp_path / "x.ckpt", {"table.weight": in_store(rows)})
    assert torch.equal(rows, ROWS)


@pytest.mark.parametrize("chunk_rows", [10, 4])
def test_rows_when_chunks_are_larger_than_blocks_then_every_byte_is_read_and_summed_once(
    tmp_path, monkeypatch, chunk_rows
):
    """Chunks of 10 or 4 rows; 10 blocks of a row that two processes load in turn."""
    monkeypatch.setattr(stored, "BLOCK_BYTES", chunk_rows * 12)
    save_folder(tmp_path / "last.ckpt", {"state_dict": {"table.weight": in_store(ROWS)}})
    monkeypatch.setattr(stored, "BLOCK_BYTES", 12)
    reads = []
    read_pieces = files.read_pieces

    def noted(folder, stretch, **options):
        reads.append(stretch)
        return read_pieces(folder, stretch, **options)

    monkeypatch.setattr(files, "read_pieces", noted)
    for rank in (0, 1):
        found = torch.zeros_like(ROWS)
        read_stored(tmp_path / "last.ckpt", {"table.weight": in_store(found, rank=rank, world_size=2)})
        assert torch.equal(found[rank::2], ROWS[rank::2])
        assert len(reads) == len(set(reads)) == -(-10 // chunk_rows)
        reads.clear()


def test_checkpoint_when_saved_again_then_replaces_the_old_one(saved):
    save_folder(saved, checkpoint(step=9))
    assert read_checkpoint(saved)["global_step"] == 9
    assert len(list(saved.iterdir())) == 2, "one version and the pointer"


@pytest.mark.parametrize("killed_in", ["save", "_commit"])
def test_save_when_cut_short_then_the_previous_checkpoint_counts(saved, monkeypatch, killed_in):
    with monkeypatch.context() as patched:
        patched.setattr(folder, killed_in, killed)
        with pytest.raises(KeyboardInterrupt):
            save_folder(saved, checkpoint(step=9))
    assert read_checkpoint(saved)["global_step"] == 7
    save_folder(saved, checkpoint(step=11))
    assert read_checkpoint(saved)["global_step"] == 11
    assert len(list(saved.iterdir())) == 2, "what was half written is cleared away"


@pytest.mark.parametrize("killed_in", ["save", "_commit"])
def test_save_over_a_single_file_when_cut_short_then_the_file_counts(tmp_path, monkeypatch, killed_in):
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {}, "global_step": 7}, path)
    with monkeypatch.context() as patched:
        patched.setattr(folder, killed_in, killed)
        with pytest.raises(KeyboardInterrupt):
            save_folder(path, checkpoint(step=9))
    assert torch.load(path)["global_step"] == 7
    save_folder(path, checkpoint(step=11))
    assert read_checkpoint(path)["global_step"] == 11
    assert len(list(path.iterdir())) == 2, "what was half written is cleared away"
    assert list(tmp_path.iterdir()) == [path]


def test_first_save_when_cut_short_then_there_is_no_checkpoint_and_the_next_one_works(tmp_path, monkeypatch):
    path = tmp_path / "x.ckpt"
    with monkeypatch.context() as patched:
        patched.setattr(folder, "_commit", killed)
        with pytest.raises(KeyboardInterrupt):
            save_folder(path, checkpoint())
    assert not is_folder(path)
    with pytest.raises(FileNotFoundError, match="killed while it saved for the first time"):
        read_checkpoint(path)
    save_folder(path, checkpoint())
    assert is_folder(path)


def test_folder_of_something_else_when_saved_over_then_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is a folder, but no checkpoint"):
        save_folder(tmp_path, checkpoint())
    assert (tmp_path / "thesis.tex").exists()


def test_file_of_the_same_name_when_saved_over_then_is_replaced(tmp_path):
    (tmp_path / "last.ckpt").touch()
    save_folder(tmp_path / "last.ckpt", checkpoint())
    assert is_folder(tmp_path / "last.ckpt")


def test_folder_of_the_same_name_when_a_file_is_saved_then_is_replaced(saved):
    """As where a strategy with servers and then a single device write to one place."""
    FolderCheckpointIO().save_checkpoint({"state_dict": {"weight": torch.ones(3)}, "global_step": 8}, saved)
    assert saved.is_file()
    assert FolderCheckpointIO().load_checkpoint(saved)["global_step"] == 8
    assert list(saved.parent.iterdir()) == [saved]


def save_a_file(path, checkpoint):
    FolderCheckpointIO().save_checkpoint(checkpoint, path)


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("order", [(save_a_file, save_folder), (save_folder, save_a_file)])
def test_copies_that_somebody_keeps_beside_a_checkpoint_when_others_are_saved_then_they_stay_and_are_not_read(
    tmp_path, monkeypatch, order, exchanges
):
    """A copy is a file or a folder, under any of the names that people give to one."""
    if not exchanges:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    path, suffixes = tmp_path / "last.ckpt", ("old", "partial", "folder", "new", "bak")
    for save in order:
        for suffix in suffixes:
            shutil.rmtree(copy := tmp_path / f"last.ckpt.{suffix}", ignore_errors=True)
            copy.unlink(missing_ok=True)
            save(copy, {"state_dict": {"weight": torch.ones(3)}, "global_step": 7})
        assert not is_folder(path)
        with pytest.raises(FileNotFoundError):
            FolderCheckpointIO().load_checkpoint(path)
        for step, again in enumerate((*order, *order)):
            again(path, {"state_dict": {"weight": torch.zeros(3)}, "global_step": step})
            assert FolderCheckpointIO().load_checkpoint(path)["global_step"] == step
        for suffix in suffixes:
            copy = FolderCheckpointIO().load_checkpoint(tmp_path / f"last.ckpt.{suffix}")
            assert copy["global_step"] == 7
            assert torch.equal(copy["state_dict"]["weight"], torch.ones(3))
        assert sorted(x.name for x in tmp_path.iterdir()) == sorted(
            ["last.ckpt", *(f"last.ckpt.{x}" for x in suffixes)]
        )
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)


def test_rows_when_missing_or_of_another_shape_then_the_error_names_them(saved):
    with pytest.raises(KeyError, match=r"has no 'other\.weight'"):
        read_stored(saved, {"other.weight": in_store(ROWS)})
    with pytest.raises(ValueError, match=r"'table.weight' has the shape \[10, 3\], the model's has \[11, 3\]"):
        read_stored(saved, {"table.weight": in_store(torch.zeros(11, 3))})


def test_folder_when_turned_into_a_file_and_back_then_nothing_is_lost(saved, tmp_path):
    assert main(["to-file", str(saved), str(tmp_path / "one.ckpt")]) == 0
    single = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert torch.equal(single["state_dict"]["table.weight"], ROWS)
    shutil.rmtree(saved)
    assert main(["to-folder", str(tmp_path / "one.ckpt"), str(saved)]) == 0
    rows = torch.zeros(10, 3)
    read_stored(saved, {"table.weight": in_store(rows)})
    assert torch.equal(rows, ROWS)
    assert read_checkpoint(saved)["loops"] == {"fit_loop": {}}


def test_copies_of_averaging_callbacks_when_saved_without_rows_then_are_read_with_them(tmp_path):
    dense = {"layer.weight": torch.full((2, 2), 5.0)}
    callbacks = {"average": {"average_model_state": dense, "n_averaged": 1}, "other": {"average_model_state": None}}
    save_folder(tmp_path / "a.ckpt", checkpoint() | {"current_model_state": dense, "callbacks": callbacks})
    to_file(tmp_path / "a.ckpt", tmp_path / "one.ckpt")
    for read in (read_checkpoint(tmp_path / "a.ckpt"), torch.load(tmp_path / "one.ckpt", weights_only=True)):
        for copy in (read["current_model_state"], read["callbacks"]["average"]["average_model_state"]):
            assert copy["layer.weight"].tolist() == [[5.0, 5.0]] * 2
            assert copy["table.weight"].data_ptr() == read["state_dict"]["table.weight"].data_ptr()
            assert torch.equal(copy["table.weight"], ROWS)
        assert read["callbacks"]["other"] == {"average_model_state": None}
    own = read_checkpoint(tmp_path / "a.ckpt", without={"table.weight"})
    assert "table.weight" not in own["current_model_state"]


def test_command_when_the_source_is_missing_then_says_so(tmp_path, capsys):
    assert main(["to-file", str(tmp_path / "none"), str(tmp_path / "one.ckpt")]) == 1
    assert "holds no folder checkpoint" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"no checkpoint", b"PK\x05\x06" + bytes(18), torch.ones(3)])
def test_command_when_the_source_is_no_checkpoint_then_says_so(tmp_path, capsys, content):
    path = tmp_path / "x.ckpt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    assert main(["to-folder", str(path), str(tmp_path / "folder")]) == 1
    assert f"lightning-recsys-checkpoint: {path} " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_command_when_the_disk_is_full_then_says_so_and_leaves_what_was_there(saved, tmp_path, capsys):
    (tmp_path / "one.ckpt").write_text("before")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limit[1]))
    try:
        assert main(["to-file", str(saved), str(tmp_path / "one.ckpt")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "File too large: " in capsys.readouterr().err
    assert (tmp_path / "one.ckpt").read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"one.ckpt", "last.ckpt"}


class Setting:
    """Something that torch.load refuses unless it is told to trust the file."""

    def __eq__(self, other):
        return isinstance(other, Setting)

    __hash__ = None


def test_objects_in_a_checkpoint_when_not_trusted_then_are_refused(tmp_path, capsys):
    save_folder(tmp_path / "x.ckpt", {**checkpoint(), "hyper_parameters": {"setting": Setting()}})
    arguments = ["to-file", str(tmp_path / "x.ckpt"), str(tmp_path / "one.ckpt")]
    assert main(arguments) == 1
    assert "--trusted" in capsys.readouterr().err
    assert main([*arguments, "--trusted"]) == 0
    assert torch.load(tmp_path / "one.ckpt", weights_only=False)["hyper_parameters"]["setting"] == Setting()


def test_version_when_read_by_torch_alone_then_is_the_state_dict(saved, tmp_path):
    version = saved / (saved / "current").read_text()
    dcp_to_torch_save(version, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=False)["state_dict"]
    assert torch.equal(plain["table.weight"], ROWS)
    assert torch.equal(plain["layer.weight"], torch.ones(2, 2))


def test_conversion_when_called_from_python_then_does_the_same(saved, tmp_path):
    to_file(saved, tmp_path / "one.ckpt")
    to_folder(tmp_path / "one.ckpt", tmp_path / "two.ckpt")
    assert torch.equal(read_checkpoint(tmp_path / "two.ckpt")["state_dict"]["table.weight"], ROWS)


def version_of(path):
    return path / (path / "current").read_text()


def read_everything(path):
    rows = torch.zeros_like(ROWS)
    read_stored(path, {"table.weight": in_store(rows)})
    read_checkpoint(path)
    read_extras(path, 0)
    return rows


DATA_FILES = ["__0_0.distcp", "meta.pt", "extras-00000.pt", "manifest.json"]


@pytest.mark.parametrize("name", DATA_FILES)
@pytest.mark.parametrize("place", [0, 0.2, 0.4, 0.6, 0.8, 0.999])
def test_file_when_a_bit_has_flipped_then_the_error_names_file_and_checkpoint(saved, name, place):
    file = version_of(saved) / name
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 4
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=rf"last\.ckpt: {name} is damaged"):
        read_everything(saved)


@pytest.mark.parametrize("name", DATA_FILES)
@pytest.mark.parametrize("left", [0, 0.5, 0.999])
def test_file_when_cut_short_then_the_error_names_file_and_checkpoint(saved, name, left):
    file = version_of(saved) / name
    os.truncate(file, int(left * file.stat().st_size))
    with pytest.raises(DamagedCheckpointError, match=rf"last\.ckpt: {name} (ends after|is damaged)"):
        read_everything(saved)


@pytest.mark.parametrize("name", DATA_FILES)
def test_file_when_missing_or_a_link_then_the_error_names_file_and_checkpoint(saved, name, tmp_path):
    file = version_of(saved) / name
    file.rename(tmp_path / name)
    with pytest.raises(DamagedCheckpointError, match=rf"last\.ckpt: {name} cannot be read"):
        read_everything(saved)
    file.symlink_to(tmp_path / name)
    with pytest.raises(DamagedCheckpointError, match=rf"last\.ckpt: {name} cannot be read"):
        read_everything(saved)


class RunsWhenRead:
    """A pickle that runs a program of a stranger."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "meta.pt", "extras-00000.pt"])
def test_checkpoint_of_a_stranger_when_read_then_none_of_its_files_runs_a_program(saved, name, tmp_path):
    """The stranger knows how to make sums."""
    version, proof, content = version_of(saved), tmp_path / "ran", io.BytesIO()
    if name == ".metadata":
        content.write(pickle.dumps(RunsWhenRead(proof)))
    else:
        torch.save(RunsWhenRead(proof), content)
    listed = json.loads((version / "manifest.json").read_text())["content"]
    chunks = [chunk for x in listed["tensors"].values() for chunk in x["chunks"] if chunk[2][0] == name]
    (version / name).write_bytes(content.getvalue() * max(len(chunks), 1))
    length, crc32 = len(content.getvalue()), zlib.crc32(content.getvalue())
    if name in listed["files"]:
        listed["files"][name] = [name, 0, length, crc32]
    for number, chunk in enumerate(chunks):
        chunk[2] = [name, number * length, length, crc32]
    sum_of_list = zlib.crc32(json.dumps(listed).encode())
    (version / "manifest.json").write_text(json.dumps({"crc32": sum_of_list, "content": listed}))
    if name == ".metadata":
        assert torch.equal(read_everything(saved), ROWS)
    else:
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            read_everything(saved)
    assert not proof.exists()


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "", "00000007-0000000x", "__0_0.distcp"])
def test_pointer_when_it_leaves_its_folder_then_is_refused(saved, name):
    (saved / "current").write_text(name)
    with pytest.raises(DamagedCheckpointError, match=r"last\.ckpt: current names no version of a checkpoint"):
        read_checkpoint(saved)


def test_version_when_a_link_or_missing_then_is_refused(saved, tmp_path):
    version = version_of(saved)
    version.rename(tmp_path / version.name)
    with pytest.raises(DamagedCheckpointError, match=r"current names .*, which is no folder in the checkpoint's own"):
        read_checkpoint(saved)
    version.symlink_to(tmp_path / version.name, target_is_directory=True)
    with pytest.raises(DamagedCheckpointError, match=r"current names .*, which is no folder in the checkpoint's own"):
        read_checkpoint(saved)


def forge(path, change):
    """Change the contents of a version's manifest, and make its sum fit."""
    manifest = version_of(path) / "manifest.json"
    content = json.loads(manifest.read_text())["content"]
    change(content["tensors"])
    manifest.write_text(json.dumps({"crc32": zlib.crc32(json.dumps(content).encode()), "content": content}))


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "meta.pt/../../x", 7])
def test_manifest_when_it_names_a_file_elsewhere_then_is_refused(saved, file):
    def elsewhere(tensors):
        tensors["layer.weight"]["chunks"][0][2][0] = file

    forge(saved, elsewhere)
    with pytest.raises(DamagedCheckpointError, match=r"manifest.json is damaged: .* is no file of a version"):
        read_checkpoint(saved)


def halves(*places):
    """Two chunks of half a square tensor each, at these places."""

    def change(tensors):
        (chunk,) = tensors["square"]["chunks"]
        file, start, length, checksum = chunk[2]
        stretch = [file, start, length // len(places), checksum]
        tensors["square"]["chunks"] = [[list(at), list(shape), stretch] for at, shape in places]

    return change


def grown(rows, *, length=None):
    """A tensor of absurdly many rows, which lie in the same bytes."""

    def change(tensors):
        square = tensors["square"]
        square["shape"] = [rows, 4]
        square["chunks"][0][1] = [rows, 4]
        square["chunks"][0][2][2] = length or square["chunks"][0][2][2]

    return change


def repeated(tensors):
    """As many chunks as there are rows, all of the same bytes."""
    square = tensors["square"]
    place = square["chunks"][0][2]
    square["shape"] = [1000 * 4, 4]
    square["chunks"] = [[[4 * number, 0], [4, 4], place] for number in range(1000)]


def moved(key, start):
    """A tensor whose bytes begin elsewhere in the file."""

    def change(tensors):
        tensors[key]["chunks"][0][2][1] = start

    return change


def cut_everywhere(tensors):
    """A tensor in two halves along each of five dimensions."""
    shape, half = [2] * 5, [1] * 5
    file, start, length, checksum = tensors["square"]["chunks"][0][2]
    stretch = [file, start, length // 32, checksum]
    tensors["square"]["shape"] = shape
    tensors["square"]["chunks"] = [[list(at), half, stretch] for at in itertools.product((0, 1), repeat=5)]


FORGED = [
    (halves(([0, 0], [2, 4]), ([0, 0], [2, 4])), "manifest.json is damaged: two chunks overlap"),
    (halves(([0, 0], [2, 4]), ([1, 0], [2, 4])), "manifest.json is damaged: two chunks overlap"),
    (halves(([0, 0], [4, 2]), ([0, 1], [4, 2])), "manifest.json is damaged: two chunks overlap"),
    (halves(([0, 0], [2, 4]), ([3, 0], [2, 4])), "manifest.json is damaged: a chunk leaves the shape"),
    (halves(([0, 0], [2, 4])), r"manifest.json is damaged: the chunks do not cover the shape \(4, 4\)"),
    (grown(2**50), "manifest.json is damaged: a chunk of 18014398509481984 bytes cannot lie in"),
    (grown(2**50, length=2**54), r"__0_0.distcp ends after [0-9]+ bytes, of 1801439850948[0-9]+ at least"),
    (repeated, r"__0_0.distcp ends after [0-9]+ bytes, of [0-9]+ at least"),
    (moved("square", 10**30), r"__0_0.distcp ends after [0-9]+ bytes, of 1000000000000000000000000[0-9]+ at least"),
    (moved("columns", 2**40), r"__0_0.distcp ends after [0-9]+ bytes, of 109951162[0-9]+ at least"),
    (cut_everywhere, "manifest.json is damaged: a tensor is cut along at most 4 dimensions, got 5"),
]


@pytest.mark.parametrize(("change", "message"), FORGED, ids=range(len(FORGED)))
def test_manifest_when_its_chunks_do_not_make_up_a_tensor_then_nothing_is_made_or_read(tmp_path, change, message):
    state = {"square": torch.arange(16.0).view(4, 4), "columns": torch.zeros(3, 2)}
    save_folder(tmp_path / "x.ckpt", {"state_dict": state, "global_step": 0})
    forge(tmp_path / "x.ckpt", change)
    with pytest.raises(DamagedCheckpointError, match=rf"x.ckpt: {message}"):
        read_checkpoint(tmp_path / "x.ckpt")


def test_manifest_when_chunks_lie_beside_each_other_in_any_order_then_is_read():
    stretch = Stretch("__0_0.distcp", 0, 1000, 0)
    places = [((2, 0), (2, 3)), ((0, 2), (2, 2)), ((2, 3), (2, 1)), ((0, 0), (2, 2)), ((4, 0), (0, 4))]
    _check_cover(torch.float32, (4, 4), [SavedChunk(*place, stretch) for place in places])
    _check_cover(torch.float32, (0, 4), [])
    _check_cover(torch.float32, (), [SavedChunk((), (), stretch)])


def test_chunks_when_they_are_cut_anyhow_then_cover_is_what_counting_every_number_says():
    """Random chunks of a random tensor, as many numbers as it has: each of them in one, or some in two."""
    generator, found = np.random.default_rng(0), {True: 0, False: 0}
    stretch = Stretch("__0_0.distcp", 0, 1000, 0)
    for _ in range(400):
        shape = tuple(generator.integers(2, 6, size=generator.integers(1, 4)).tolist())
        chunks = [((0,) * len(shape), shape)]
        for _ in range(generator.integers(2, 8)):  # one of them is cut in two
            offsets, sizes = chunks.pop(generator.integers(len(chunks)))
            dim = int(generator.integers(len(shape)))
            size = int(generator.integers(0, sizes[dim] + 1))
            for at, length in ((0, size), (size, sizes[dim] - size)):
                cut_at, cut_size = list(offsets), list(sizes)
                cut_at[dim], cut_size[dim] = offsets[dim] + at, length
                chunks.append((tuple(cut_at), tuple(cut_size)))
        moved_one = int(generator.integers(len(chunks)))
        offsets, sizes = chunks[moved_one]
        if generator.integers(2):
            offsets = tuple(int(generator.integers(0, w - s + 1)) for w, s in zip(shape, sizes, strict=True))
        chunks[moved_one] = offsets, sizes
        counts = np.zeros(shape, dtype=int)
        for offsets, sizes in chunks:
            counts[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] += 1
        found[covers := bool((counts == 1).all())] += 1
        with nullcontext() if covers else pytest.raises(ValueError, match="two chunks overlap"):
            _check_cover(torch.float32, shape, [SavedChunk(*chunk, stretch) for chunk in chunks])
    assert min(found.values()) > 40


@pytest.mark.timeout(20)
def test_chunks_when_each_column_is_one_then_they_are_checked_in_seconds():
    """Each of them has all rows, so comparing each with all others took two minutes."""
    stretch, width = Stretch("__0_0.distcp", 0, 1000, 0), 6000
    columns = [SavedChunk((0, at), (4, 1), stretch) for at in range(width)]
    _check_cover(torch.float32, (4, width), columns)
    with pytest.raises(ValueError, match="two chunks overlap"):
        _check_cover(torch.float32, (4, width), [*columns[:-1], columns[0]])


@pytest.mark.parametrize(("limit", "file"), [(1000, "__0_0.distcp"), (4000, "meta.pt"), (6000, "extras-00000.pt")])
def test_disk_when_full_then_the_error_names_file_and_checkpoint_and_the_previous_one_counts(saved, limit, file):
    """A limit of the system on the size of files stands for the disk."""
    whole = checkpoint(step=9) | {"loops": {"text": "x" * (5000 if file == "meta.pt" else 0)}}
    extras = {"replica": torch.zeros(2000 if file.startswith("extras") else 2)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(
            CheckpointNotWrittenError, match=rf"last\.ckpt was not written: .*File too large: '.*{file}'"
        ):
            save_folder(saved, whole, extras=extras)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read_checkpoint(saved)["global_step"] == 7
    assert len(list(saved.iterdir())) == 2, "what was begun takes no room"
    save_folder(saved, whole, extras=extras)
    assert read_checkpoint(saved)["global_step"] == 9


def test_tensors_of_any_kind_when_saved_then_are_back(tmp_path):
    state = {
        "number": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
        "half": torch.randn(3, 2, 2).bfloat16(),
        "view": torch.arange(12).view(3, 4).t(),
    }
    save_folder(tmp_path / "x.ckpt", {"state_dict": state, "global_step": 0})
    read = read_checkpoint(tmp_path / "x.ckpt")["state_dict"]
    assert read.keys() == state.keys()
    assert all(torch.equal(read[key], value) and read[key].dtype == value.dtype for key, value in state.items())


def test_single_file_when_it_was_written_without_sums_then_loads(tmp_path):
    with files.summing_once():
        torch.save({"state_dict": {"weight": torch.ones(3)}, "global_step": 8}, tmp_path / "model.ckpt")
    assert FolderCheckpointIO().load_checkpoint(tmp_path / "model.ckpt")["global_step"] == 8


def test_single_file_when_a_byte_changes_or_it_is_cut_short_then_it_is_refused_or_loads_as_it_was(tmp_path):
    file, target = tmp_path / "model.ckpt", tmp_path / "folder"
    weight = torch.linspace(-1, 1, 400)
    checkpoint = {"state_dict": {"weight": weight}, "global_step": 8, "pytorch-lightning_version": "2.6.0"}
    FolderCheckpointIO().save_checkpoint(checkpoint, file)
    written = file.read_bytes()
    start = written.index(weight.numpy().tobytes())
    refused = set()
    for place in {*range(0, len(written), 29), *range(start, start + 1600, 101)}:
        file.write_bytes(written[:place] + bytes([written[place] ^ 4]) + written[place + 1 :])
        try:
            found = FolderCheckpointIO().load_checkpoint(file)
        except (
            DamagedCheckpointError,
            RuntimeError,
            pickle.UnpicklingError,
        ):  # torch finds by itself what its reader stumbles over
            refused.add(place)
        else:  # what nobody reads, such as padding
            assert found["global_step"] == 8
            torch.testing.assert_close(found["state_dict"]["weight"], weight, rtol=0, atol=0)
    assert refused >= set(range(start, start + 1600, 101))
    for damaged in (written[: len(written) // 2], written[:start] + bytes(4) + written[start + 4 :]):
        file.write_bytes(damaged)
        with pytest.raises(DamagedCheckpointError, match=r"model\.ckpt"):
            FolderCheckpointIO().load_checkpoint(file)
        with pytest.raises(DamagedCheckpointError, match=r"model\.ckpt"):
            to_folder(file, target)
        with pytest.raises(DamagedCheckpointError, match=r"model\.ckpt"):
            ReadsFolders.load_from_checkpoint(file)
    assert not target.exists()


def test_path_when_it_is_a_file_url_then_is_that_path(tmp_path):
    url = f"file://{tmp_path}/last.ckpt"
    save_folder(url, {"state_dict": {"w": torch.ones(2)}, "global_step": 1})
    assert [x.name for x in tmp_path.iterdir()] == ["last.ckpt"]
    assert read_checkpoint(url)["global_step"] == read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 1


def test_url_when_its_library_fails_then_the_error_says_which_checkpoint_was_not_written(monkeypatch):
    def fail(self, path, **options):
        raise RuntimeError("unable to locate credentials")  # as botocore's errors, which are no OSError

    monkeypatch.setattr(MemoryFileSystem, "info", fail)
    with pytest.raises(CheckpointNotWrittenError, match=r"memory://a/last\.ckpt.*unable to locate credentials"):
        save_folder("memory://a/last.ckpt", {"state_dict": {"w": torch.ones(2)}, "global_step": 1})


def test_version_when_another_one_counts_by_now_then_is_not_read_as_that_one(saved):
    version = folder.version_of(saved)
    first = read_checkpoint(version, without={"table.weight"})
    save_folder(saved, {"state_dict": {"table.weight": ROWS + 1}, "global_step": first["global_step"] + 1})
    assert torch.equal(read_checkpoint(saved)["state_dict"]["table.weight"], ROWS + 1)
    with pytest.raises(DamagedCheckpointError, match=r"cannot be read .* Take a copy of the checkpoint"):
        read_stored(version, {"table.weight": in_store(torch.empty_like(ROWS))})


class Plain(pl.LightningModule):
    """Somebody's own module, which inherits from nothing of this package."""

    def __init__(self, width=1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)


def test_module_without_the_mixin_when_a_strategy_was_made_then_loads_from_a_folder_and_from_a_file(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(saving, "pl_load", cloud_io._load)  # as in a program that has made none
    trained = Plain(width=3)
    checkpoint = {"state_dict": trained.state_dict(), "hyper_parameters": dict(trained.hparams)}
    checkpoint["pytorch-lightning_version"] = pl.__version__
    save_folder(tmp_path / "best.ckpt", checkpoint)
    torch.save(checkpoint, tmp_path / "file.ckpt")
    with pytest.raises(IsADirectoryError):
        Plain.load_from_checkpoint(tmp_path / "best.ckpt")
    ForkserverDDPStrategy()
    once = saving.pl_load
    ForkserverDDPStrategy()
    assert saving.pl_load is once
    for path in (tmp_path / "best.ckpt", str(tmp_path / "best.ckpt"), tmp_path / "file.ckpt"):
        loaded = Plain.load_from_checkpoint(path)
        assert torch.equal(loaded.layer.weight, trained.layer.weight)


def test_own_when_ranks_have_died_or_others_have_added_something_then_found_by_what_it_is(tmp_path, monkeypatch):
    """Of ranks 0 to 3 the first is dead, the next has rows alone, and the others a replica each."""
    added = [{"rows": 1}, {"part": {"number": 2, "x": 20}}, {"part": {"number": 3, "x": 30}, "rows": 3}]
    path = tmp_path / "last.ckpt"
    save_folder(path, {"state_dict": {}}, extras=added[0])
    monkeypatch.setattr(folder, "_num_extras", lambda path: len(added))
    monkeypatch.setattr(folder, "read_extras", lambda path, index, weights_only: added[index])
    for expected in range(4):
        assert folder.read_own(path, "part", {"number": 2}, expected=expected) == {"number": 2, "x": 20}
        assert folder.read_own(path, "part", {"number": 3}, expected=expected)["x"] == 30
        assert folder.read_own(path, "part", {"number": 0}, expected=expected) is None


def test_own_when_the_checkpoint_is_a_file_then_there_is_none(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "one.ckpt")
    assert folder.read_own(tmp_path / "one.ckpt", "part", {}, expected=0) is None
