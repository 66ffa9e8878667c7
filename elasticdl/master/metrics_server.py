"""MetricsServer: the HTTP server that Prometheus scrapes, only at /metrics.

It speaks OpenMetrics and the text format, as the scraper requests.  Any client of the port may read; a slow or silent
one occupies one of a few threads until newer ones need it, and never affects the job.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.registry import Collector

from elasticdl.rpc.addresses import listen, written
from elasticdl.rpc.handshake import Lobby
from elasticdl_client.errors import JobError

PATH = "/metrics"
MAX_SCRAPES = 8  # concurrently
TIMEOUT_S = 10.0  # for a read or write; Prometheus' own default is as long
RETRY_S = 1.0
POLL_S = 0.1  # limits the wait of `close` for the thread
_BACKLOG = 16

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
logger = logging.getLogger("elasticdl.master")


class MetricsServer:
    """Serves from its construction on until `close`.

    Args:
        host: Host to listen on.
        port: Port to listen on.
        collector: Collector of the job's metrics.
        is_patient: Retry a taken port in the background instead of raising, because the job runs already.

    Raises:
        JobError: The port is taken, or forbidden for this user.
    """

    def __init__(self, host: str, port: int, collector: Collector, *, is_patient: bool = False) -> None:
        self._address = (host, port)
        registry = CollectorRegistry()
        registry.register(collector)
        ProcessCollector(registry=registry)
        self._application = _only_metrics(cast(Application, make_wsgi_app(registry)))
        self._closed = threading.Event()
        self._server: _HttpServer | None = None
        try:
            self._open()
        except OSError as error:
            if not is_patient:
                raise JobError(
                    f"--metrics_port={port} cannot be used: {error.strerror}",
                    "name another port, or leave --metrics_port out: no metrics are served then",
                ) from error
            logger.warning("--metrics_port=%d cannot be used yet: %s; it is tried again", port, error.strerror)
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._closed.set()
        self._thread.join()

    def _open(self) -> None:
        host, port = self._address
        self._server = _HttpServer(listen(host, port, _BACKLOG), self._application)
        logger.info("Metrics for Prometheus are served at http://%s%s", written(host, port), PATH)

    def _run(self) -> None:
        while self._server is None:
            if self._closed.wait(RETRY_S):
                return
            try:
                self._open()
            except OSError as error:
                logger.debug("--metrics_port: %s", error)
        while not self._closed.is_set():
            self._server.handle_request()
        self._server.server_close()


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: scrapes are not logged."""


class _HttpServer(ThreadingMixIn, WSGIServer):
    """One thread per request, of a few; it takes over a listening socket."""

    daemon_threads = True
    timeout = POLL_S  # of `handle_request`

    def __init__(self, listening: socket.socket, application: Application) -> None:
        address = listening.getsockname()[:2]
        super().__init__(address, _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_name, self.server_port = address  # the base class would query the DNS for a name
        self.setup_environ()
        self.set_app(application)
        self._scrapes = Lobby(MAX_SCRAPES)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._scrapes.enter(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Release the thread at the end of each request, however it ends."""
        self._scrapes.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log errors except those of a reader that has gone away; called inside of an `except`."""
        error = sys.exception()
        if not isinstance(error, OSError):
            logger.error("A scrape of the metrics has failed", exc_info=error)


def _only_metrics(metrics: Application) -> Application:
    """Answer 404 for other paths: prometheus_client answers with the metrics at any path."""

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == PATH:
            return metrics(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"The metrics are at {PATH}.\n".encode()]

    return application
