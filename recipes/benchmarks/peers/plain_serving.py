"""A model with one ``nn.Embedding`` per field under LitServe, as many serve it. Arguments: port, cardinalities."""

from __future__ import annotations

import sys
from typing import Any

import litserve
import torch
from benchmarks.harness.workload import Workload
from benchmarks.peers.plain_lightning import PlainModule

Encoded = tuple[torch.Tensor, torch.Tensor]


class PlainAPI(litserve.LitAPI):
    """Takes the same requests as ``recipes/serve.py``."""

    def __init__(self, cardinalities: tuple[int, ...]) -> None:
        super().__init__(max_batch_size=64, batch_timeout=0.002)
        self.cardinalities = cardinalities

    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        work = Workload(cardinalities=self.cardinalities)
        self.names = list(work.fields)
        self.build(work)

    def build(self, work: Workload) -> None:
        """Make the model."""
        self.module = PlainModule(work, "dlrm").eval()

    def score(self, dense: torch.Tensor, ids_BF: torch.Tensor) -> torch.Tensor:
        """Logits ``[B]``."""
        vectors = torch.stack([table(ids_BF[:, f]) for f, table in enumerate(self.module.embeddings)], 1)
        logits: torch.Tensor = self.module.dense_part(dense, vectors)
        return logits

    def decode_request(self, request):  # noqa: ANN001, ANN201 - LitServe reads the annotations
        dense = torch.tensor([row["dense"] for row in request["rows"]], dtype=torch.float32)
        return dense, torch.tensor([[row[name] for name in self.names] for row in request["rows"]])

    @torch.no_grad()
    def predict(self, x: list[Encoded]) -> list[Any]:
        dense, ids_BF = (torch.cat(parts) for parts in zip(*x, strict=True))
        scores = self.score(dense, ids_BF).sigmoid().split([len(request[0]) for request in x])
        return [{"probabilities": some.tolist()} for some in scores]

    def encode_response(self, output):  # noqa: ANN001, ANN201 - as above
        return output


def serve(api: type[PlainAPI]) -> None:
    """Answer by such a model, at the port and with the tables that the command line names."""
    port, cardinalities = int(sys.argv[1]), tuple(map(int, sys.argv[2].split(",")))
    server = litserve.LitServer(api(cardinalities), accelerator="cpu", devices=1)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="warning")


if __name__ == "__main__":
    serve(PlainAPI)
