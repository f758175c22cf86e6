"""`Console`: a page, its script and style, and one document of numbers that the page asks for.

Who asks is known by the kernel's word: for connections within this machine it says which user has
the other end. Others are refused, and so are names in place of addresses in the Host header: a page
from elsewhere whose name was made to lead here is not to read what its visitor may.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable
from importlib.resources import files

from kvstore.console.peer import uid_of_peer
from kvstore.core.errors import KVStoreError
from kvstore.httpd import Answer, Request

_log = logging.getLogger("kvstore.console")

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
PAGES = {"/console": "index.html", "/console/style.css": "style.css", "/console/page.js": "page.js"}
DATA = "/console/data.json"
# Nothing from elsewhere, nothing inline, in nobody's frame.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Console:
    """Answers requests below /console; None for all others.

    `refusal` says why a user may not look, None if he may; `data` makes the document and may
    raise KVStoreError. Both are called from threads of the watch server.
    """

    def __init__(
        self,
        refusal: Callable[[int], str | None],
        data: Callable[[], bytes],
        uid_of: Callable[[Request], int | None] | None = None,
    ) -> None:
        self._refusal, self._data = refusal, data
        self._uid_of = uid_of or (lambda request: uid_of_peer(request.client, request.server))
        folder = files("kvstore.console")
        self._pages = {path: (folder / name).read_bytes() for path, name in PAGES.items()}

    def answer(self, request: Request) -> Answer | None:
        path = request.path.rstrip("/") or "/"
        if path != DATA and path not in self._pages:
            return None
        reason = self._refused(request)
        if reason is not None:
            return Answer(403, "text/plain", f"{reason}\n".encode(), HEADERS)
        if path == DATA:
            return self._document()
        kind = TYPES[PAGES[path].rpartition(".")[2]]
        return Answer(200, f"{kind}; charset=utf-8", self._pages[path], HEADERS)

    def _refused(self, request: Request) -> str | None:
        if not is_address(request.host):
            return "open the console by an address, such as http://127.0.0.1:9750/console"
        uid = self._uid_of(request)
        if uid is None:
            return "the console is for users of this machine; from another one, use `ssh -L`"
        return self._refusal(uid)

    def _document(self) -> Answer:
        try:
            return Answer(200, "application/json", self._data(), HEADERS)
        except KVStoreError as error:
            return Answer(503, "text/plain", f"{error}\n".encode(), HEADERS)
        except Exception:
            _log.exception("the console's document could not be made")
            return Answer(500, "text/plain", b"a bug; the daemon's log has it\n", HEADERS)


def is_address(host: str) -> bool:
    """Whether a Host header is an IP address or localhost, with a port or without."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    name = name if not host.startswith("[") else host[1:].partition("]")[0]
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
