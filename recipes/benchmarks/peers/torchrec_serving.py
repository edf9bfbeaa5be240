"""TorchRec's eager DLRM under LitServe, to be held beside ``recipes/serve.py``. Arguments: port, cardinalities."""

from __future__ import annotations

import warnings

import torch
from benchmarks.harness.workload import Workload
from benchmarks.peers.plain_serving import PlainAPI, serve

from lightning_recsys.embeddings.kernels.fbgemm_kernel import without_chatter


class TorchRecAPI(PlainAPI):
    """Takes the same requests as ``recipes/serve.py``."""

    def build(self, work: Workload) -> None:
        with without_chatter(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
            from torchrec.models.dlrm import DLRM

            tables = [
                EmbeddingBagConfig(name=name, embedding_dim=work.dim, num_embeddings=rows, feature_names=[name])
                for name, rows in work.fields.items()
            ]
            collection = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
            network = DLRM(collection, work.num_dense, [512, 256, 64, work.dim], [512, 256, 1])
        self.network = network.eval()

    def score(self, dense: torch.Tensor, ids_BF: torch.Tensor) -> torch.Tensor:
        from torchrec import KeyedJaggedTensor

        lengths = torch.ones(ids_BF.numel(), dtype=torch.int32)
        logits: torch.Tensor = self.network(
            dense, KeyedJaggedTensor(self.names, ids_BF.t().reshape(-1), lengths=lengths)
        )
        return logits.squeeze(1)


if __name__ == "__main__":
    serve(TorchRecAPI)
