"""An HTTP port at which a process tells how it is doing: ``/metrics``, ``/health`` and ``/ready``."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

if TYPE_CHECKING:
    from prometheus_client import Metric

Collect = Callable[[], "Iterable[Metric]"]
"""Makes the metric families of the moment; it is called in a thread of the endpoint's, at each scrape."""

IDLE_SECONDS = 5.0  # for a peer to send its request, and to take what it is answered


class MonitoringEndpoint:
    r"""Answers ``GET`` requests in threads of its own. A context manager; nothing of it is left after it.

    ============  ===============================================================================================
    ``/metrics``  what ``collect`` makes and the process's own figures (memory, processor, descriptors), for Prometheus
    ``/health``   200 as long as the process answers
    ``/ready``    200 from :meth:`set_ready` on, until :meth:`set_unready`; 503 before and after
    ============  ===============================================================================================

    Nobody is asked for a key: whoever reaches the port can read it. The figures are counts; no parameter, key or id of
    a row is among them.

    Args:
        host: Address to listen at.
        port: Port to listen at; 0 for a free one.
        collect: Makes the process's metrics; see :data:`Collect`.

    Attributes:
        url: Where it listens, such as ``http://127.0.0.1:9200``.

    Raises:
        ModuleNotFoundError: ``prometheus-client`` is not installed; the message says how to install it.
        OSError: the port is taken, or the address is not this machine's; the message has both.

    >>> import urllib.request
    >>> with MonitoringEndpoint() as endpoint:
    ...     urllib.request.urlopen(endpoint.url + "/health").read()
    b'ok\n'
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        collect: Collect = tuple,
    ) -> None:
        client = _prometheus_client()
        registry = client.CollectorRegistry()
        self._collect = collect
        registry.register(_Collector(self))
        client.ProcessCollector(registry=registry)
        self._metrics = client.make_wsgi_app(registry)
        self._is_ready = False
        try:
            self._server = _Server(host, port, self._answer)
        except OSError as error:
            raise OSError(error.errno, f"cannot tell metrics at {host} port {port}: {error.strerror}") from None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="monitoring-endpoint", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set_ready(self, collect: Collect | None = None) -> None:
        """Answer 200 to ``/ready``, and tell what ``collect`` makes from now on, where it is given."""
        if collect is not None:
            self._collect = collect
        self._is_ready = True

    def set_unready(self) -> None:
        """Answer 503 to ``/ready``, and tell nothing but the process's own figures; a scrape under way ends first."""
        self._is_ready = False
        with self._server.collecting:
            self._collect = tuple

    def close(self) -> None:
        """Stop answering, and cut who is connected; nothing happens a second time."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def collect(self) -> list[Metric]:
        """The metrics of the moment."""
        with self._server.collecting:
            return list(self._collect())

    def _answer(self, environment: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environment["PATH_INFO"]
        if path == "/metrics":
            answer: Iterable[bytes] = self._metrics(environment, start_response)
            return answer
        if path == "/health":
            status, text = "200 OK", "ok\n"
        elif path == "/ready":
            status, text = ("200 OK", "ready\n") if self._is_ready else ("503 Service Unavailable", "not ready\n")
        else:
            status, text = "404 Not Found", "there are /metrics, /health and /ready\n"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text)))])
        return [text.encode()]


class _Collector:
    """The metrics that the registry asks for."""

    def __init__(self, endpoint: MonitoringEndpoint) -> None:
        self._endpoint = endpoint

    def describe(self) -> list[Metric]:
        """Nothing: the registry would ask for everything when the collector is registered."""
        return []

    def collect(self) -> list[Metric]:
        return self._endpoint.collect()


class _Handler(WSGIRequestHandler):
    timeout = IDLE_SECONDS

    def handle(self) -> None:
        with suppress(OSError):  # who asked is gone, or too slow
            super().handle()

    def log_message(self, *_: Any) -> None:
        """Log no request."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = False  # those are not waited for

    def __init__(self, host: str, port: int, application: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.collecting = threading.Lock()  # held while metrics are made
        self._connected: set[Any] = set()
        super().__init__((host, port), _Handler)
        self.set_app(application)

    def server_bind(self) -> None:
        """Bind without asking for the machine's name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connected.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connected.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Cut who is connected, and wait for the threads that answered them."""
        for request in list(self._connected):
            with suppress(OSError):  # it is gone
                request.shutdown(socket.SHUT_RDWR)
        super().server_close()


def _prometheus_client() -> Any:
    try:
        import prometheus_client
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "prometheus-client is needed to tell metrics: pip install 'lightning-recsys[metrics]'"
        ) from None
    return prometheus_client
