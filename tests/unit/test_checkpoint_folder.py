"""Folder checkpoints of one process: what is written comes back, and what is half written does not count."""

import shutil

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_recsys.checkpoints import (
    FolderCheckpointIO,
    StoredTensor,
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


def test_command_when_the_source_is_missing_then_says_so(tmp_path, capsys):
    assert main(["to-file", str(tmp_path / "none"), str(tmp_path / "one.ckpt")]) == 1
    assert "holds no folder checkpoint" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


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
