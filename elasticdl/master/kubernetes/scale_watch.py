"""Watches the annotation of the job's ConfigMap that says how many workers the user wants; changes nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

from elasticdl.cluster.kubernetes.api import ApiCalls, ApiServer, Closed, Object, Query
from elasticdl_client.errors import ElasticDLError
from elasticdl_client.kubernetes import names

_STREAM_S = 60  # after it the server ends a stream, and the object is read again; one that is silent longer is broken
_SILENCE_S = 3.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0

logger = logging.getLogger("elasticdl.master")


class ScaleWatch:
    """One observer's view of one ConfigMap.

    Args:
        api_client: a `kubernetes.client.ApiClient`; its configuration is used.
        namespace: of the job.
        job_name: whose ConfigMap exists.
        calls: counts the calls.
    """

    def __init__(self, api_client: Any, namespace: str, job_name: str, calls: ApiCalls) -> None:
        self._api = ApiServer(api_client, namespace, calls)
        self._name = names.job_object(job_name)
        self._trouble = ""

    def requests(self, stop: threading.Event) -> Iterator[str]:
        """Yield the annotation's value and each change of it, until `stop` is set or the watch is closed; never fail.

        A ConfigMap without the annotation says nothing.
        """
        known, pause_s = "", 0.0
        while not stop.wait(pause_s):
            try:
                for found in self._read_and_watch():
                    self._all_well()
                    text = (found["metadata"].get("annotations") or {}).get(names.NUM_WORKERS_ANNOTATION, "")
                    if text and text != known:
                        yield text
                    known, pause_s = text, 0.0
            except Closed:
                return
            except ElasticDLError as error:
                self._say_trouble(error.what)
                pause_s = min(max(_FIRST_PAUSE_S, 2 * pause_s), _LONGEST_PAUSE_S)

    def close(self) -> None:
        """Ends the watch."""
        self._api.close()

    def _read_and_watch(self) -> Iterator[Object]:
        """The object as it is, then as it changes, until the stream ends."""
        found = self._api.call("GET", self._api.namespaced(f"configmaps/{self._name}"))
        yield found
        query: Query = {"watch": 1, "fieldSelector": f"metadata.name={self._name}", "timeoutSeconds": _STREAM_S}
        query["resourceVersion"] = str(found["metadata"]["resourceVersion"])
        with self._api.stream(self._api.namespaced("configmaps"), query, _STREAM_S + _SILENCE_S) as lines:
            for line in lines:
                if line["type"] in ("ERROR", "DELETED"):  # the version is too old; the job is being deleted
                    raise ElasticDLError(f"The watch of ConfigMap {self._name} was ended.")
                yield line["object"]

    def _say_trouble(self, what: str) -> None:
        if what != self._trouble:
            logger.warning("The wanted number of workers cannot be read for the moment: %s", what)
            self._trouble = what

    def _all_well(self) -> None:
        if self._trouble:
            logger.info("The wanted number of workers can be read again")
            self._trouble = ""
