"""Answers requests over HTTP, by LitServe: scores of raw rows, by the version that counts."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import litserve
from fastapi import HTTPException
from torch import Tensor, cat, split

from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.serving.files import VersionFolder
from lightning_recsys.serving.reader import ModelReader, PublishedModel

_Encoded = tuple[PublishedModel, Tensor, SparseFeatures]


class ScoringAPI(litserve.LitAPI):  # type: ignore[misc]
    """``POST /predict``: ``{"rows": [...]}``, or one row, to ``{"version": 17, "probabilities": [...]}``.

    Rows of requests that come together are scored together. Each request is encoded and scored by one version, that
    which is open when it comes.

    Args:
        url: Where versions are published.
        cache: Where files of a remote folder are kept.
        follow_seconds: Between two looks for a new version.
        max_batch_size: Requests that are scored together, at most.
        batch_timeout: Seconds to wait for that many.
    """

    def __init__(
        self,
        url: str,
        *,
        cache: str | None = None,
        follow_seconds: float = 1.0,
        max_batch_size: int = 64,
        batch_timeout: float = 0.002,
    ) -> None:
        super().__init__(max_batch_size=max_batch_size, batch_timeout=batch_timeout)
        self.url, self.cache, self.follow_seconds = url, cache, follow_seconds
        self.status_folder: str | None = None  # where each worker notes which version it has

    def setup(self, device: str) -> None:
        """Open the version that counts, and follow."""
        self.reader = ModelReader(self.url, cache=self.cache)
        self.reader.follow(self.follow_seconds, tell=self._note)

    def _note(self, model: PublishedModel) -> None:
        if self.status_folder is not None:
            target = Path(self.status_folder) / f"{os.getpid()}.json"
            status = {"version": model.version, "created": model.manifest.created, "example": model.encoder.example()}
            temporary = target.with_suffix(".new")
            temporary.write_text(json.dumps(status))
            temporary.replace(target)

    # LitServe reads the annotations of the next two; without one a request is JSON of any kind.
    def decode_request(self, request):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
        """Encode the rows; a wrong one is status 422, and disturbs no other request."""
        model = self.reader.model
        try:
            rows = request["rows"] if isinstance(request, Mapping) and "rows" in request else [request]
            if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
                raise ValueError("give a row, or a list of at least one row under 'rows'.")
            return model, *model.encoder.encode(rows)
        except ValueError as error:
            raise HTTPException(status_code=422, detail=str(error)) from error

    def predict(self, x: _Encoded | list[_Encoded]) -> Any:
        """Score the rows of one request, or of several at once."""
        requests = x if isinstance(x, list) else [x]
        answers: dict[int, dict[str, Any]] = {}
        for model in {id(model): model for model, *_ in requests}.values():
            places = [place for place, request in enumerate(requests) if request[0] is model]
            dense = cat([requests[place][1] for place in places])
            sparse = SparseFeatures.cat([requests[place][2] for place in places])
            scores = split(model.logits(dense, sparse).sigmoid(), [len(requests[place][1]) for place in places])
            for place, some in zip(places, scores, strict=True):
                answers[place] = {"version": model.version, "probabilities": some.tolist()}
        found = [answers[place] for place in range(len(requests))]
        return found if isinstance(x, list) else found[0]

    def encode_response(self, output):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
        """The answer as it is."""
        return output


def make_server(api: ScoringAPI, *, workers: int = 1) -> litserve.LitServer:
    """A server with ``POST /predict``, ``GET /health`` and ``GET /example``.

    ``/health`` names the oldest version that a worker answers by, and its age in seconds; ``/example`` is a request
    that the version takes.

    Args:
        api: What it answers by.
        workers: Processes that score; they share the rows of local files.

    Raises:
        FileNotFoundError: nothing was published there yet.
    """
    if VersionFolder(api.url, cache=api.cache).current() is None:
        raise FileNotFoundError(
            f"{api.url}: nothing was published there yet. Start again once a first version is there."
        )
    folder = tempfile.TemporaryDirectory(prefix="lightning-recsys-serving-")
    api.status_folder = folder.name
    # LitServe's own check says whether workers run; the version is in what each worker notes.
    server = litserve.LitServer(
        api, accelerator="cpu", devices=1, workers_per_device=workers, healthcheck_path="/ready"
    )
    server.status_folder = folder  # lives as long as the server

    def status() -> dict[str, Any]:
        found = [json.loads(path.read_text()) for path in Path(folder.name).glob("*.json")]
        if not found:
            raise HTTPException(status_code=503, detail="no version is open yet")
        oldest: dict[str, Any] = min(found, key=lambda x: x["created"])
        return oldest | {"workers": len(found)}

    def health() -> dict[str, Any]:
        now = status()
        age = time.time() - now["created"]
        return {"status": "ok", "version": now["version"], "age_seconds": round(age, 3), "workers": now["workers"]}

    def example() -> dict[str, Any]:
        return {"rows": [status()["example"]]}

    server.app.add_api_route("/health", health)
    server.app.add_api_route("/example", example)
    return server
