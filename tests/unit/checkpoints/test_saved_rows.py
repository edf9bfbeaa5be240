"""Rows are read from a checkpoint as they are asked for, and a model predicts with them as with its own."""

from __future__ import annotations

import pytest
import torch

from lightning_recsys.checkpoints import SavedRows, StoredTensor, save_folder, stored
from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.errors import DamagedCheckpointError
from lightning_recsys.models import DeepFM
from lightning_recsys.tasks import CTRTask, load_for_prediction

ROWS = torch.arange(300.0).view(100, 3)


def in_chunks(rows: torch.Tensor) -> StoredTensor:
    return StoredTensor(
        shape=rows.shape,
        dtype=rows.dtype,
        read=lambda first, count: rows[first : first + count],
        write=lambda first, values: None,
    )


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A table in chunks of 7 rows, as many processes might have written it."""
    monkeypatch.setattr(stored, "BLOCK_BYTES", 7 * 3 * 4)
    state = {
        "table.weight": in_chunks(ROWS),
        "narrow": in_chunks(ROWS.bfloat16()),
        "half": torch.ones(2, dtype=torch.float16),
        "other": torch.ones(50, 3),
    }
    save_folder(tmp_path / "a.ckpt", {"state_dict": state})
    return tmp_path / "a.ckpt"


def test_rows_when_asked_for_then_come_in_that_order_from_their_chunks_alone(saved):
    rows = SavedRows(saved, "table.weight")
    asked = torch.tensor([99, 0, 7, 6, 6])
    assert torch.equal(rows.take(asked), ROWS[asked])
    assert sorted(rows._mapped) == [0, 1, 14]  # of 15 chunks


def test_rows_when_saved_as_bfloat16_then_come_as_float32(saved):
    asked = torch.tensor([99, 0, 7, 6, 6])
    found = SavedRows(saved, "narrow").take(asked)
    assert found.dtype == torch.float32
    assert torch.equal(found, ROWS[asked].bfloat16().float())


def test_rows_when_none_is_asked_for_then_none_come(saved):
    assert SavedRows(saved, "table.weight").take(torch.empty(0, dtype=torch.int64)).shape == (0, 3)


def test_rows_when_a_chunk_is_damaged_then_an_error_once_one_of_its_rows_is_asked_for(saved):
    (file,) = saved.glob("*/*.distcp")
    content = bytearray(file.read_bytes())
    place = content.index(ROWS[50].numpy().tobytes())
    content[place] ^= 1
    file.write_bytes(content)
    rows = SavedRows(saved, "table.weight")
    assert torch.equal(rows.take(torch.tensor([1])), ROWS[1:2])
    with pytest.raises(DamagedCheckpointError, match="not those that were written"):
        rows.take(torch.tensor([51]))
    file.unlink()
    with pytest.raises(DamagedCheckpointError, match="cannot be read"):
        rows.take(torch.tensor([30]))


def test_rows_when_there_is_no_such_tensor_then_it_is_named(saved):
    with pytest.raises(KeyError, match="has no 'tables'"):
        SavedRows(saved, "tables")
    with pytest.raises(ValueError, match=r"'half' is torch\.float16"):
        SavedRows(saved, "half")


# --- A whole model ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request):
    """What rows are kept in."""
    return request.param


@pytest.fixture
def trained(dtype):
    """A task with bags, weights that are not zero, and a batch."""
    torch.manual_seed(0)
    data = SyntheticDataModule(
        train_rows=64, batch_size=64, cardinalities=(20, 30, 9), multi_hot={"c1": 3}, num_dense=2
    )
    data.setup("fit")
    task = CTRTask(DeepFM(data.num_dense, data.fields, embedding_dim=4, pooling="mean", dtype=dtype))
    optimizer = task.configure_optimizers()
    batch = next(iter(data.train_dataloader()))
    task.training_step(batch, 0)["loss"].backward()
    optimizer.step()
    return data, task.eval(), batch


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_model_when_loaded_for_prediction_then_predicts_the_same_without_rows_of_its_own(
    kind, trained, dtype, tmp_path
):
    data, task, batch = trained
    checkpoint = {"state_dict": task.state_dict(), "global_step": 1}
    path = tmp_path / "a.ckpt"
    torch.save(checkpoint, path) if kind == "file" else save_folder(path, checkpoint)
    empty = CTRTask(DeepFM(data.num_dense, data.fields, embedding_dim=4, pooling="mean", device="meta", dtype=dtype))
    loaded = load_for_prediction(empty, path)
    assert not any(x.is_meta for x in loaded.parameters())
    with torch.no_grad():
        torch.testing.assert_close(loaded(batch), task(batch), rtol=1e-6, atol=1e-6)
    with pytest.raises(RuntimeError, match="cannot be trained"):
        loaded.train()(batch)


def test_model_when_a_byte_of_its_file_has_changed_then_is_not_loaded_for_prediction(trained, tmp_path):
    data, task, _ = trained
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": task.state_dict(), "global_step": 1}, path)
    written = bytearray(path.read_bytes())
    written[written.index(max(task.parameters(), key=len).detach().numpy().tobytes()) + 6] ^= 64
    path.write_bytes(written)
    empty = CTRTask(DeepFM(data.num_dense, data.fields, embedding_dim=4, pooling="mean", device="meta"))
    with pytest.raises(DamagedCheckpointError, match=r"a\.ckpt"):
        load_for_prediction(empty, path)


def test_model_when_a_table_has_another_size_then_says_which(trained, tmp_path):
    data, task, _ = trained
    save_folder(tmp_path / "a.ckpt", {"state_dict": task.state_dict()})
    other = CTRTask(DeepFM(data.num_dense, {**data.fields, "c2": 10}, embedding_dim=4, device="meta"))
    with pytest.raises(ValueError, match=r"c2.weight' has the shape \[9, \d\] in the checkpoint, .* has \[10, \d\]"):
        load_for_prediction(other, tmp_path / "a.ckpt")
