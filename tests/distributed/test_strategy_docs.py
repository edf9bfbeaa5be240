"""The strategy that docs/own_strategy.md writes is one, and its table names all that there is to override."""

import inspect
import re
import time
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from served_strategy import make_trainer
from torch import nn

from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.optim import RowSGD
from lightning_recsys.strategies import (
    ComposedStrategy,
    DensePart,
    Pace,
    RecsysStrategy,
    Rows,
    ServedRows,
    ServedStrategy,
)

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(120),
    # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]

PAGE = (Path(__file__).parents[2] / "docs" / "own_strategy.md").read_text()
BATCHES = (4, 7)  # of rank 0 and of rank 1
LR, GAP = 0.5, 2


class Ids:
    """A rank's batches: row 0, and one that no other rank looks up."""

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        return iter([SparseFeatures(("user",), torch.tensor([0, 1 + self.rank]))] * BATCHES[self.rank])

    def __len__(self):
        return BATCHES[self.rank]


class Counting(pl.LightningModule):
    """Each lookup takes ``LR`` from its row. Rank 1 begins when rank 0 has made all of its steps."""

    def __init__(self):
        super().__init__()
        table = EmbeddingBagConfig("user", 4, 2, ("user",), init_std=0.0)
        self.tables = EmbeddingBagCollection([table], optimizer=RowSGD(lr=LR))
        self.bias = nn.Parameter(torch.zeros(1))

    @property
    def rounds(self):
        return self.trainer.strategy.stores("center")[0].dense_store("center").version

    def training_step(self, batch, batch_idx):
        until = time.monotonic() + 60
        while self.global_rank == 1 and self.rounds < BATCHES[0] // GAP:
            assert time.monotonic() < until, "rank 0 waits for rank 1"
            time.sleep(0.01)
        return self.tables(batch).sum() + self.bias.sum()

    def on_train_end(self):
        self.trainer.strategy.barrier()
        assert self.trainer.world_size == 2
        assert self.rounds == sum(batches // GAP for batches in BATCHES)

    def configure_optimizers(self):
        return torch.optim.SGD([self.bias], lr=0.1)

    def train_dataloader(self):
        return Ids(self.global_rank)


KEEPS = """
class Keeps(LocalSGD):
    def keep(self, tensors):  # the centre is there within a run alone
        assert self._center.pull().numel() == 1
        return tensors
"""


@pytest.mark.parametrize("rows", ["plain", "cached"])
def test_part_when_written_as_in_the_docs_then_trains_rows_on_two_workers_with_unequal_batches(
    tmp_path, monkeypatch, rows
):
    (code,) = (x for x in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "LocalSGD" in x)
    (tmp_path / "local_sgd_of_the_docs.py").write_text(code + KEEPS)
    monkeypatch.syspath_prepend(tmp_path)
    from local_sgd_of_the_docs import Keeps, strategy

    assert (strategy.dense.gap, type(strategy.rows)) == (8, ServedRows)
    model = Counting()
    make_trainer(strategy=ComposedStrategy(dense=Keeps(gap=GAP), rows=rows)).fit(model)
    trained = model.tables.state_dict()["embedding_bags.user.weight"]
    assert trained[:, 0].tolist() == [-LR * sum(BATCHES), -LR * BATCHES[0], -LR * BATCHES[1], 0.0]
    assert -0.1 * max(BATCHES) < model.bias.item() < 0


class Free(RecsysStrategy):
    """Workers that run free, and nothing else."""

    asynchronous = True
    wraps_model = False


def test_asynchronous_strategy_when_tables_are_in_the_workers_memory_then_refused_before_training():
    with pytest.raises(ValueError, match=r"Free is asynchronous, and the rows of tables are in .*ServedStrategy"):
        make_trainer(strategy=Free()).fit(Counting())


def names_of(strategy):
    """What a strategy's class has, public and not Lightning's alone."""
    own = [kind for kind in strategy.__mro__ if issubclass(kind, RecsysStrategy)]
    return {name for kind in own for name in vars(kind) if not name.startswith("_")}


def test_table_when_compared_with_the_classes_then_names_all_that_there_is_to_override():
    section = PAGE.split("## All that a strategy may set, override or use")[1].split("\n## ")[0]
    rows = [re.match(r"\| `(\w+)", line) for line in section.splitlines() if line.startswith("| `")]
    told = [row[1] for row in rows]
    assert len(told) == len(set(told))
    annotated = set(inspect.get_annotations(RecsysStrategy))
    assert set(told) == {name for name in names_of(ServedStrategy) | annotated if not name.startswith("_")}
    stars = {row[1] for line in section.splitlines() if (row := re.match(r"\| `(\w+)[^|]*\* \|", line))}
    assert stars == names_of(ServedStrategy) - names_of(RecsysStrategy)


def test_attributes_when_compared_with_an_object_then_the_page_names_them():
    section = PAGE.split("Attributes to use:")[1].split("\n\n")[0]
    told = set(re.findall(r"`(\w+)`\*? \(", section)) | set(re.findall(r"and `(\w+)`\* \(", section))
    arguments = {x for kind in (RecsysStrategy, ServedStrategy) for x in inspect.signature(kind.__init__).parameters}

    class Plain(ServedStrategy):
        strategy_name = "plain"

    public = {name for name in vars(Plain()) if not name.startswith("_")} - set(vars(DDPStrategy())) - arguments
    assert told == public - set(inspect.get_annotations(RecsysStrategy)), "those are in the table"


def test_contracts_when_compared_with_the_classes_then_the_page_names_each_method():
    section = PAGE.split("## The three contracts")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    told = set(re.findall(r"`(\w+)", " ".join(cells)))
    for kind in (DensePart, Rows, ServedRows, Pace):
        own = {name for base in kind.__mro__[:-1] for name in vars(base) if not name.startswith("_")}
        beside = {"name", "exchanged_bytes", "num_replicas", "binds", "maps_stores"}  # what telemetry and plumbing read
        beside |= {"tables", "plan", "collections", "strategy"}
        assert own - beside <= told, kind.__name__
