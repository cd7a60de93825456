"""Serves the page of episodes to this machine, made anew whenever it is asked for."""

import asyncio
import logging
from collections.abc import Callable

from tornado import web

log = logging.getLogger(__name__)


class _Page(web.RequestHandler):
    def initialize(self, render: Callable[[int | None], str], lock: asyncio.Lock) -> None:
        self.make, self.lock = render, lock

    def prepare(self) -> None:
        # Another site's script must not read the page under a name of its own that resolves to this machine.
        if self.request.host_name not in ("localhost", "127.0.0.1"):
            raise web.HTTPError(403, f"host {self.request.host_name!r} is not this machine")

    async def get(self) -> None:
        last = self.get_query_argument("last", None)
        if last is not None and not last.isdecimal():
            raise web.HTTPError(400, "last is the index of a group")
        async with self.lock:
            text = await asyncio.to_thread(self.make, None if last is None else int(last))
        self.set_header("Cache-Control", "no-store")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.finish(text)


def make_app(render: Callable[[int | None], str]) -> web.Application:
    """The application of one page.

    Args:
      render: index of the newest group wanted, or None for the newest there is, to a page.
    """
    return web.Application([("/", _Page, {"render": render, "lock": asyncio.Lock()})])


async def serve(render: Callable[[int | None], str], port: int, ready: Callable[[], None] = lambda: None) -> None:
    """Serves the page on the loopback address until cancelled; calls `ready` once it listens."""
    server = make_app(render).listen(port, address="127.0.0.1")
    ready()
    try:
        await asyncio.Event().wait()
    finally:
        server.stop()
