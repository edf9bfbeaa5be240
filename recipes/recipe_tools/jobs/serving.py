"""A server of predictions, until it is told to end: what ``recipes/serve.py`` does."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

from omegaconf import DictConfig
from recipe_tools.config_types import check_complete

from lightning_recsys.errors import PublishedVersionError


def run(cfg: DictConfig) -> None:
    """Answer as ``cfg`` says."""
    check_complete(cfg)
    try:
        from lightning_recsys.serving.server import ScoringAPI, make_server
    except ImportError as error:
        hint = "serve needs the extra [serving] of this package: pip install fsspec safetensors litserve"
        raise SystemExit(f"{hint} ({error})") from None
    names = ("version", "cache", "follow_seconds", "stale_after", "max_rows", "max_batch_size", "batch_timeout")
    ready = f"{cfg.url} answers at http://{cfg.host}:{cfg.port}/predict, and follows new versions. Ctrl-C ends it."
    try:
        api = ScoringAPI(cfg.url, **{name: cfg[name] for name in names})
        server = make_server(
            api, workers=cfg.workers, max_bytes=cfg.max_bytes, on_ready=lambda: print(ready, flush=True)
        )
    except (FileNotFoundError, PublishedVersionError, ImportError, ValueError) as error:
        raise SystemExit(str(error)) from None  # fsspec's errors name the scheme, or the package, that it lacks
    except OSError as error:
        raise SystemExit(f"{cfg.url} cannot be read: {error}") from None
    _end_as_with_control_c()
    print(f"Opening {cfg.url} ...", flush=True)
    serve(server, host=cfg.host, port=cfg.port)


def serve(server: Any, *, host: str, port: int) -> None:
    """Answer until Ctrl-C, and leave no process behind.

    LitServe ends what it has started where Ctrl-C comes once it answers. Before, and while it starts the processes
    that answer, some would stay, and this one would wait for them for ever.

    Raises:
        SystemExit: host or port cannot be, or a worker cannot open the version or was killed.
    """
    try:
        server.run(host=host, port=port, generate_client_file=False, log_level="warning")
    except (ValueError, RuntimeError) as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        pass
    finally:
        for process in multiprocessing.active_children():
            process.kill()
            process.join()


def _end_as_with_control_c() -> None:
    """Let SIGTERM end all processes of the server, which LitServe does for SIGINT alone."""
    server = os.getpid()

    def end(*_: object) -> None:
        if os.getpid() != server:  # a process that was forked, and has no handler of its own yet
            os._exit(128 + signal.SIGTERM)
        raise KeyboardInterrupt  # not SIGINT, which whatever a script starts in the background ignores

    signal.signal(signal.SIGTERM, end)
