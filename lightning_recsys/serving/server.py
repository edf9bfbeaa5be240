"""Answers requests over HTTP, by LitServe: scores of raw rows, by the version that counts."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any

import litserve
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from torch import Tensor, cat, split

from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.launchers.processes import end_with_parent, ending
from lightning_recsys.serving.files import VersionFolder
from lightning_recsys.serving.reader import Look, ModelReader, PublishedModel

_Encoded = tuple[PublishedModel, Tensor, SparseFeatures]
_LONGEST_TEMPORARY = 75
"""Characters of a temporary folder: a socket's name has 107 at most, and multiprocessing appends 32 to it."""
_HANGING_SECONDS = 30.0
"""The time that a look at a source may take, beside the time between two looks: a slow network does not hang."""
_BACKLOG = 2048
"""Connections that wait to be accepted, as many as uvicorn lets."""


@dataclass(frozen=True)
class _Refused:
    """Why a request gets no scores. It is an answer and no exception, which LitServe would give to all of a batch."""

    status: int
    detail: str


class ScoringAPI(litserve.LitAPI):  # type: ignore[misc]
    """``POST /predict``: ``{"rows": [...]}``, or one row, to ``{"version": 17, "probabilities": [...]}``.

    Rows of requests that come together are scored together. Each request is encoded and scored by one version, that
    which is open when it comes.

    Args:
        url: The folder, or its URL, that versions are published into.
        version: Answer by this version and no other.
        cache: Where files of a remote folder are kept.
        follow_seconds: Seconds between two looks for a new version.
        stale_after: Looks in a row that failed, after which there is a warning and ``/health`` says ``stale``. It says
            so as well where no look has ended for as long as so many take, and 30 seconds: a source may hang.
        max_rows: Rows of a request, at most; one worker scores them all, and others wait for it.
        max_batch_size: Requests that are scored together, at most.
        batch_timeout: Seconds to wait until so many requests are there; those that are there by then are scored.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        url: str,
        *,
        version: int | None = None,
        cache: str | None = None,
        follow_seconds: float = 1.0,
        stale_after: int = 3,
        max_rows: int = 1000,
        max_batch_size: int = 64,
        batch_timeout: float = 0.002,
    ) -> None:
        if not follow_seconds > 0:
            raise ValueError(f"follow_seconds must be above 0, got {follow_seconds}.")
        for name, count in {"stale_after": stale_after, "max_rows": max_rows}.items():
            _check_count(name, count)
        super().__init__(max_batch_size=max_batch_size, batch_timeout=batch_timeout)
        self.stale_after, self.max_rows = stale_after, max_rows
        self._look: Look | None = None  # the latest one
        self._is_told = False  # whether the worker's file has more to say of a look than when it was
        self.url, self.version, self.cache, self.follow_seconds = url, version, cache, follow_seconds
        self.status_folder: str | None = None  # where each worker notes which version it has

    def setup(self, device: str) -> None:
        """Open the version that counts, and follow."""
        if multiprocessing.parent_process() is not None:  # in the process that LitServe starts for it
            end_with_parent()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is LitServe's, which ends this process afterwards
        self.reader = ModelReader(self.url, cache=self.cache, version=self.version)
        self.reader.predict([self.reader.model.encoder.example()])  # so that no request waits for compiled loops
        self.reader.follow(self.follow_seconds, warn_after=self.stale_after, tell=self._note, looked=self._note_look)

    def _note(self, model: PublishedModel) -> None:
        if (target := self._status_file) is not None:
            status = {"version": model.version, "created": model.manifest.created, "example": model.encoder.example()}
            if is_told := (look := self._look) is not None and (look.opening or look.failures > 0):
                status |= asdict(look)
            temporary = target.with_suffix(".new")
            temporary.write_text(json.dumps(status))
            temporary.replace(target)
            self._is_told = is_told

    def _note_look(self, look: Look) -> None:
        """Note why a look failed, or that it opens a version; of one that did neither, the file's time tells."""
        self._look = look
        if look.opening or look.failures or self._is_told:
            self._note(self.reader.model)
        elif (target := self._status_file) is not None:
            os.utime(target)

    @property
    def _status_file(self) -> Path | None:
        return None if self.status_folder is None else Path(self.status_folder) / f"{os.getpid()}.json"

    # LitServe and FastAPI read the annotations of the next two as objects, so those stand below the class.
    def decode_request(self, request):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
        """Encode the rows; a wrong one is status 422, and disturbs no other request."""
        model = self.reader.model
        try:
            rows = request.get("rows", [request])
            if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
                raise ValueError("give a row, or a list of at least one row under 'rows'.")
            if len(rows) > self.max_rows:
                raise ValueError(
                    f"a request has at most {self.max_rows} rows, got {len(rows)}: send several requests, or start the"
                    " server with a larger max_rows."
                )
            return model, *model.encoder.encode(rows)
        except ValueError as error:
            return _Refused(422, str(error))

    def predict(self, x: _Encoded | _Refused | list[_Encoded | _Refused]) -> Any:
        """Score the rows of one request, or of several at once."""
        requests = x if isinstance(x, list) else [x]
        answers: dict[int, dict[str, Any] | _Refused] = {}
        groups: dict[int, list[tuple[int, _Encoded]]] = {}  # the requests of each version, with their places
        for place, request in enumerate(requests):
            if isinstance(request, _Refused):
                answers[place] = request
            else:
                groups.setdefault(id(request[0]), []).append((place, request))
        for group in groups.values():
            model = group[0][1][0]
            dense = cat([request[1] for _, request in group])
            sparse = SparseFeatures.cat([request[2] for _, request in group])
            scores = model.logits(dense, sparse).sigmoid()
            for (place, _), some in zip(group, split(scores, [len(x[1]) for _, x in group]), strict=True):
                answers[place] = _answer(model, some)
        found = [answers[place] for place in range(len(requests))]
        return found if isinstance(x, list) else found[0]

    def encode_response(self, output):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
        """The answer as it is; a refusal with its status."""
        if isinstance(output, _Refused):
            return JSONResponse({"detail": output.detail}, status_code=output.status)
        return output


ScoringAPI.decode_request.__annotations__["request"] = dict[str, Any]  # FastAPI refuses what is no JSON object


def _check_count(name: str, count: int) -> None:
    if type(count) is not int or count < 1:
        raise ValueError(f"{name} must be a whole number above 0, got {count!r}.")


def _answer(model: PublishedModel, scores: Tensor) -> dict[str, Any] | _Refused:
    wrong = (~scores.isfinite()).nonzero().flatten().tolist()
    if wrong:  # JSON has no such number, and it is the model's fault, not the request's
        return _Refused(500, f"row {wrong[0]}: the score by version {model.version} is {scores[wrong[0]].item()}.")
    return {"version": model.version, "probabilities": scores.tolist()}


class _Server(litserve.LitServer):  # type: ignore[misc]
    """Says when it answers."""

    on_ready: Callable[[], None]
    _is_ending = False
    _lost: str | None = None  # how a worker has ended that was not to end

    def _start_server(
        self, port: Any, num_servers: Any, log_level: Any, sockets: Any, *others: Any, **options: Any
    ) -> Any:
        """Start the processes that answer, once a worker has a version open, and say so.

        They listen only when they have started. This process listens before it forks them, on the socket that they
        share, so that a request which comes meanwhile waits and is not refused.
        """
        for each in sockets:
            each.listen(_BACKLOG)
        servers = super()._start_server(port, num_servers, log_level, sockets, *others, **options)
        self.on_ready()
        return servers

    def run(self, *arguments: Any, **options: Any) -> None:
        """Answer until the end.

        Raises:
            RuntimeError: a worker was killed.
        """
        super().run(*arguments, **options)
        if self._lost is not None:
            hint = ", as the system does when memory runs out" if "SIGKILL" in self._lost else ""
            raise RuntimeError(
                f"A process that scores requests {self._lost}{hint}, so the server has ended. Start it again, with"
                " fewer workers where memory is short."
            )

    def _start_worker_monitoring(self, *_: Any) -> None:
        """End all where a worker ends: what it was asked would never be answered.

        LitServe does so from a thread of its own, under the feet of this one, which then ends with an EOFError.
        """

        def watch() -> None:
            workers = {worker.sentinel: worker for worker in self.inference_workers}
            ended = workers[wait(list(workers))[0]]
            if not self._is_ending:
                ended.join()
                self._lost = ending(ended.exitcode)
                self._shutdown_event.set()

        threading.Thread(target=watch, daemon=True, name="worker-watch").start()

    def _perform_graceful_shutdown(self, manager: Any, api_servers: Any, reason: str = "normal") -> None:
        self._is_ending = True
        if reason == "keyboard_interrupt":  # a signal to all of the processes at once may reach a worker first
            self._lost = None
        super()._perform_graceful_shutdown(manager, api_servers, reason)


def make_server(
    api: ScoringAPI, *, workers: int = 1, max_bytes: int = 4 << 20, on_ready: Callable[[], None] = lambda: None
) -> litserve.LitServer:
    """A server with ``POST /predict``, ``GET /health`` and ``GET /example``.

    ``/health`` names the oldest version that a worker answers by, and its age in seconds; where looks for a new version
    fail or hang, also for how long and why. ``/health?stale=503`` has that status then. ``/example`` is a request that
    the version takes. All of its processes end with this one, however it ends.

    Args:
        api: Encodes and scores the requests.
        workers: Processes that score; they share the rows of local files.
        max_bytes: Bytes of a request's body, at most; a larger one is status 413, before it is read as JSON.
        on_ready: Is called once, when it begins to answer.

    Raises:
        FileNotFoundError: nothing was published there yet.
        PublishedVersionError: the version that it is to answer by is not there.
        ValueError: there are to be no workers or bytes, or the path of the temporary folder is too long for the sockets
            of LitServe's processes.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}.")
    _check_count("max_bytes", max_bytes)
    temporary = tempfile.gettempdir()
    if len(os.fsencode(temporary)) > _LONGEST_TEMPORARY:
        raise ValueError(
            f"the temporary folder {temporary} has {len(os.fsencode(temporary))} characters, and the sockets of the"
            f" server's processes allow {_LONGEST_TEMPORARY}: set TMPDIR to a shorter one, such as TMPDIR=/tmp."
        )
    published = VersionFolder(api.url, cache=api.cache)
    if published.counting() is None:
        raise FileNotFoundError(
            f"{api.url}: nothing was published there yet. Start again once a first version is there."
        )
    if api.version is not None:
        published.find(api.version)
    folder = tempfile.TemporaryDirectory(prefix="lightning-recsys-serving-")
    api.status_folder = folder.name
    # LitServe's own check says whether workers run; the version is in what each worker notes.
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "workers_per_device": workers}
    server = _Server(api, healthcheck_path="/ready", max_payload_size=max_bytes, **options)
    server.on_ready = on_ready
    server.status_folder = folder  # lives as long as the server
    # Those that LitServe forks from this process, which answer and hold its queues; workers see to it in `setup`.
    register_after_fork(server, lambda _: end_with_parent(Path(folder.name)))

    stale_seconds = api.stale_after * api.follow_seconds + _HANGING_SECONDS
    _add_routes(server.app, Path(folder.name), stale_after=api.stale_after, stale_seconds=stale_seconds)
    _add_refusals(server.app, max_bytes)
    return server


def _add_routes(app: FastAPI, folder: Path, *, stale_after: int, stale_seconds: float) -> None:
    """Add the routes that tell of the server, from what its workers note in a folder.

    Args:
        app: The server's application.
        folder: The folder that each worker notes its version and its latest look in.
        stale_after: Looks of a worker in a row that failed, after which the server is stale.
        stale_seconds: Seconds without a look that succeeded, after which it is stale as well. The time in which a
            worker opens a version does not count.
    """

    def status() -> dict[str, Any]:
        found = [_noted(path) for path in folder.glob("*.json")]
        if not found:
            raise HTTPException(status_code=503, detail="no version is open yet")
        oldest: dict[str, Any] = min(found, key=lambda x: x["created"])
        worst = max(found, key=lambda x: x["failures"])
        now = time.time()
        seen = min(now if x["opening"] and not x["failures"] else x["seen"] for x in found)
        looking = min((x["seen"] for x in found if not x["opening"]), default=now)
        failed = {key: worst[key] for key in ("failures", "error")}
        return oldest | failed | {"seen": seen, "looking": looking, "workers": len(found)}

    def health(stale: int = 200) -> JSONResponse:
        if not 200 <= stale <= 599:
            raise HTTPException(status_code=422, detail=f"stale takes an HTTP status from 200 to 599, got {stale}.")
        now = status()
        looking = time.time() - now["looking"]
        waiting = f"a look for a new version has not ended for {looking:.0f} s" if looking > stale_seconds else None
        is_stale = now["failures"] >= stale_after or waiting is not None
        answer = {
            "status": "stale" if is_stale else "ok",
            "version": now["version"],
            "age_seconds": round(time.time() - now["created"], 3),
            "workers": now["workers"],
            "stale_seconds": round(max(time.time() - now["seen"], 0.0), 3),
            "last_error": now["error"] or waiting,
        }
        return JSONResponse(answer, status_code=stale if is_stale else 200)

    def example() -> dict[str, Any]:
        return {"rows": [status()["example"]]}

    app.add_api_route("/health", health, response_model=None)
    app.add_api_route("/example", example)


def _noted(path: Path) -> dict[str, Any]:
    """The note of a worker; a look that neither failed nor opens a version has left nothing but the file's time."""
    noted: dict[str, Any] = {"failures": 0, "error": None, "opening": False, "seen": path.stat().st_mtime}
    noted |= json.loads(path.read_text())
    return noted


def _add_refusals(app: FastAPI, max_bytes: int) -> None:
    """Say what is wrong with a request that is no JSON object, or too long."""

    async def refuse(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["loc"][0] == "query":
            return JSONResponse({"detail": f"{first['loc'][-1]}: {first['msg']}."}, status_code=422)
        why = f"{first['msg']}: {first['ctx']['error']}" if "ctx" in first else first["msg"]
        where = f" at character {first['loc'][1]}" if first["type"] == "json_invalid" else ""
        return no_object(f"{why}{where}")

    async def refuse_text(request: Request, error: HTTPException) -> JSONResponse:
        """Bytes may be no text, or have brackets in thousands of others, or numbers with thousands of digits."""
        return no_object(str(error.__cause__ or error.detail))

    def no_object(why: str) -> JSONResponse:
        expected = "a request is a JSON object sent as application/json, one row or {'rows': [...]}"
        return JSONResponse({"detail": f"{expected}; got another body ({why})."}, status_code=422)

    async def refuse_bytes(request: Request, error: HTTPException) -> JSONResponse:
        detail = f"a request has at most {max_bytes} bytes: send several, or start the server with a larger max_bytes."
        return JSONResponse({"detail": detail}, status_code=413)

    app.exception_handler(RequestValidationError)(refuse)
    app.exception_handler(400)(refuse_text)
    app.exception_handler(413)(refuse_bytes)
