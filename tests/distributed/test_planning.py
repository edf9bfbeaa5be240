"""Steps that are measured: with servers and with several workers, on real processes."""

import tempfile
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.models import DeepFM
from lightning_recsys.planning import measure, measuring
from lightning_recsys.tasks import CTRTask

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


def data():
    made = SyntheticDataModule(batch_size=64, train_rows=4096, val_rows=0, test_rows=0, cardinalities=(50, 60))
    made.prepare_data()
    made.setup("fit")
    return made


def test_steps_when_measured_then_bytes_are_those_of_closed_forms_and_nothing_stays(tmp_path, monkeypatch):
    own = SimpleNamespace(TemporaryDirectory=partial(tempfile.TemporaryDirectory, dir=tmp_path))
    monkeypatch.setattr(measuring, "tempfile", own)
    rows = data()
    task = CTRTask(DeepFM(rows.num_dense, rows.fields, embedding_dim=4, hidden=(8,)))
    before = {name: value.clone() for name, value in task.state_dict().items()}
    listened, sidecars = [], measuring._ServersAsElsewhere.sidecars

    def noted(servers, specs):
        made = sidecars(servers, specs)
        listened.append((made.address, made.keys is not None and servers.keys.exists()))
        return made

    monkeypatch.setattr(measuring._ServersAsElsewhere, "sidecars", noted)
    measured = measure(task, rows, methods=["single", "ddp", "shadowsync", "hierarchical"], seconds=0.5)
    assert not measured.refusals
    alone, ddp, free = measured.costs["single"][1], measured.costs["ddp"][2], measured.costs["shadowsync"][1]
    assert (alone.workers, ddp.workers, free.workers) == (1, 2, 1)
    assert alone.peer_bytes == alone.sent_bytes == alone.server_seconds == 0
    assert alone.worker_seconds > 0
    assert ddp.batch_size == 64
    # A ring of two sends each parameter once; rows' ids and gradients go beside it, 8 and 16 bytes for each of 128.
    dense = sum(x.numel() for x in task.parameters() if x.requires_grad)
    assert ddp.dense_floats == dense
    assert 4 * dense + 64 * 2 * (8 + 16) < ddp.peer_bytes < 4 * dense + 3 * 64 * 2 * (8 + 20) + 4096
    # Pooled rows come back for each field, and their gradients go with the ids.
    pooled = 64 * 2 * 4 * 4
    assert pooled <= free.received_bytes < 2 * pooled + 2048
    assert pooled + 64 * 2 * 4 <= free.sent_bytes < 3 * pooled + 4096
    assert free.server_seconds > 0
    assert free.server_bytes >= free.empty_server_bytes > 0
    assert free.requests == free.row_requests >= 2
    assert free.request_server_seconds + free.request_worker_seconds > 0  # by four servers in place of one
    group = measured.costs["hierarchical"][1]
    assert group.server_seconds > 0
    assert 0 < group.group_bytes < group.sent_bytes
    assert 0 < group.row_requests < group.requests
    assert group.request_worker_seconds == free.request_worker_seconds
    # Its servers listened as for another machine, and its worker had their keys.
    assert listened == [("127.0.0.1", True)]
    assert all(torch.equal(value, task.state_dict()[name]) for name, value in before.items())
    assert not list(tmp_path.iterdir())


def test_strategy_when_it_refuses_the_model_then_its_reason_is_kept():
    class NoRows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(13, 1)

        def forward(self, batch):
            return self.layer(batch.dense).squeeze(1)

    measured = measure(CTRTask(NoRows()), data(), methods=["des"], seconds=0.2)
    assert not measured.costs
    assert measured.refusals["des"]
    assert "\n" not in measured.refusals["des"]


def test_measurement_when_a_strategy_is_unknown_then_names_those_that_there_are():
    with pytest.raises(ValueError, match="there is no strategy hat; there are single, ddp, des"):
        measure(None, None, methods=["hat"])
