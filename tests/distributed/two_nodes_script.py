"""One of several processes, told by its environment which: shares an epoch of prepared rows, says what it saw."""

import json
import sys

import torch
from pytorch_lightning import LightningModule, Trainer

from lightning_recsys.data import PreparedDataModule


class Recorder(LightningModule):
    """Trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.told: dict = {"rows": []}

    def on_train_start(self) -> None:
        data = self.trainer.datamodule
        self.told |= {
            "world_size": self.trainer.world_size,
            "node": self.trainer.node_rank,
            "address": data._address,
            "reader": data._reader._process.pid,
        }

    def training_step(self, batch, batch_idx):
        self.told["rows"] += batch.sparse.values[: len(batch)].tolist()
        return self.layer(batch.dense).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


if __name__ == "__main__":
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", max_epochs=1, **off)
    model = Recorder()
    trainer.fit(model, datamodule=PreparedDataModule(root=sys.argv[1], batch_size=16, reader="shared"))
    torch.distributed.destroy_process_group()
    print(json.dumps(model.told))
