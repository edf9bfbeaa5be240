"""The strategy that docs/strategies.md writes is one."""

import re
from pathlib import Path

import pytest
from pytorch_lightning.strategies import StrategyRegistry
from served_strategy import Model, make_trainer

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(120),
    # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"


class Near(Model):
    """Looks at the centre once both ranks have been there twice."""

    def on_train_end(self):
        self.trainer.strategy.barrier()
        assert self.trainer.strategy.stores("center")[0].dense_store("center").version == 4


def test_strategy_when_written_as_in_the_docs_then_trains_on_two_workers(tmp_path, monkeypatch):
    (code,) = (x for x in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL) if "LocalSGD" in x)
    (tmp_path / "local_sgd_of_the_docs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    import local_sgd_of_the_docs  # noqa: F401 - registers itself

    try:
        strategy = StrategyRegistry.get("local_sgd")
        strategy.gap = 2
        trainer = make_trainer(strategy=strategy)
        trainer.fit(Near())
    finally:
        StrategyRegistry.remove("local_sgd")
    assert trainer.callback_metrics["world_size"] == 2
