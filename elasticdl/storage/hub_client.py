"""Files of repositories on the Hugging Face Hub, read by its documented API, with the verbs of fsspec that we call.

A URL is hf://[datasets/|spaces/|models/]OWNER/NAME[@REVISION][/PATH], as for HfFileSystem.  HfFileSystem caches
listings, so it would not notice a replaced file, and sends two or three requests for a range.  This client sends one
request for a range, and the answer identifies the content.  Endpoint and token are those of huggingface_hub:
HF_ENDPOINT, HF_TOKEN, or the result of `hf auth login`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from huggingface_hub import constants, get_session
from huggingface_hub.utils import HfHubHTTPError, build_hf_headers, hf_raise_for_status

from elasticdl_client.errors import StorageError

_OWNER = r"(?!(?:datasets|spaces|models|buckets)/)[^/@]+"
_URL = re.compile(
    rf"hf://(?P<root>(?:(?P<kind>datasets|spaces|models)/)?(?P<repository>{_OWNER}/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?)(?:/(?P<path>.*))?"
)
_NOT_THERE = 404
_LINKED_ETAG = "X-Linked-Etag"  # of a large file, which another server sends; its SHA-256 in the API


@dataclass(frozen=True, slots=True)
class _Place:
    """The parts of a URL.

    Attributes:
        root: URL of the repository, with the given revision.
        repository: The repository in URLs of the Hub: ``datasets/OWNER/NAME``, or ``OWNER/NAME`` for a model.
        api: The repository in URLs of the API.
    """

    root: str
    repository: str
    api: str
    revision: str
    path: str


class HubClient:
    """Files of the Hub, by URL; nothing is cached between calls.  Thread-safe."""

    async_impl = False

    def ls(self, url: str, *, timeout_s: float, detail: bool) -> list[dict[str, Any]]:
        """Return the entries of a directory, maybe none; `detail` must be True.

        Raises:
            FileNotFoundError: there is no such directory.
        """
        place = _place_of(url)
        return [_info(place, entry) for entry in self._tree(place, url, timeout_s)]

    def info(self, url: str, *, timeout_s: float) -> dict[str, Any]:
        """Return size and etag of a file, or the entry of a directory.

        Raises:
            FileNotFoundError: there is neither a file nor a directory.
        """
        place = _place_of(url)
        if not place.path:
            next(self._tree(place, url, timeout_s), None)
            return {"name": url, "type": "directory"}
        asked = f"{constants.ENDPOINT}/api/{place.api}/paths-info/{place.revision}"
        found = _json(self._send("POST", asked, url, timeout_s, data={"paths": [place.path], "expand": False}))
        if not found:
            raise FileNotFoundError(url)
        return _info(place, found[0])

    def cat_file(self, url: str, *, start: int, end: int, timeout_s: float, etag: str = "") -> bytes:
        """Return a range of a file.

        Raises:
            StorageError: the file has another etag.
            FileNotFoundError: the file does not exist.
        """
        place = _place_of(url)
        asked = f"{constants.ENDPOINT}/{place.repository}/resolve/{place.revision}/{quote(place.path)}"
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        answer = self._send("GET", asked, url, timeout_s, headers=headers)
        found = [one.headers[_LINKED_ETAG] for one in (*answer.history, answer) if _LINKED_ETAG in one.headers]
        came = (found or [answer.headers.get("ETag", "")])[0].removeprefix("W/").strip('"')
        if etag and came != etag:
            raise StorageError(f"The file {url} changed while the job reads it.", "Name a revision: OWNER/NAME@COMMIT.")
        content: bytes = answer.content
        return content

    def _tree(self, place: _Place, url: str, timeout_s: float) -> Iterator[dict[str, Any]]:
        """Yield the entries of a directory, page by page."""
        below = f"/{quote(place.path, safe='')}" if place.path else ""
        asked = f"{constants.ENDPOINT}/api/{place.api}/tree/{place.revision}{below}?recursive=false&expand=false"
        while asked:
            answer = self._send("GET", asked, url, timeout_s)
            yield from _json(answer)
            asked = answer.links.get("next", {}).get("url", "")

    def _send(self, method: str, asked: str, url: str, timeout_s: float, **named: Any) -> Any:
        """Send a request about a URL, and return the answer."""
        headers = build_hf_headers(library_name="elasticdl") | named.pop("headers", {})
        answer = get_session().request(method, asked, headers=headers, timeout=timeout_s, **named)
        try:
            hf_raise_for_status(answer)
        except HfHubHTTPError as error:
            if answer.status_code == _NOT_THERE:
                raise FileNotFoundError(url) from error
            raise
        return answer


def _place_of(url: str) -> _Place:
    """Parse a URL.

    Raises:
        StorageError: the URL has no repository.
    """
    found = _URL.fullmatch(url.rstrip("/"))
    if found is None:
        raise StorageError(
            f"{url} names no repository of the Hub.", "Write hf://datasets/OWNER/NAME/PATH, or …/NAME@REVISION/PATH."
        )
    kind = found["kind"] or "models"
    repository = found["repository"]
    revision = quote(unquote(found["revision"] or constants.DEFAULT_REVISION), safe="")
    prefix = "" if kind == "models" else f"{kind}/"
    return _Place(f"hf://{found['root']}", prefix + repository, f"{kind}/{repository}", revision, found["path"] or "")


def _info(place: _Place, entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of the API in fsspec's form; its etag is the one in answers with the file's content."""
    name = f"{place.root}/{entry['path']}"
    if entry["type"] != "file":
        return {"name": name, "type": "directory"}
    etag = (entry.get("lfs") or {}).get("oid") or entry["oid"]
    return {"name": name, "type": "file", "size": entry["size"], "etag": etag}


def _json(answer: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer.json()
    return found
