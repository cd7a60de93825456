"""A web application in a thread of its own, on a free port of this machine."""

import asyncio
import json
import threading

import urllib3
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port


class Served:
    """An application in a thread of its own."""

    def __init__(self, app):
        socket, self.port = bind_unused_port()
        self.loop, ready = asyncio.new_event_loop(), threading.Event()

        async def run():
            self.server, self.ended = HTTPServer(app), asyncio.Event()
            self.server.add_socket(socket)
            ready.set()
            await self.ended.wait()
            self.server.stop()

        self.thread = threading.Thread(target=lambda: self.loop.run_until_complete(run()))
        self.thread.start()
        ready.wait()
        self.root = f"http://127.0.0.1:{self.port}"

    def post(self, path, body, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return urllib3.request("POST", self.root + path, body=data, headers=headers, timeout=60, retries=False)

    def close(self):
        self.loop.call_soon_threadsafe(self.ended.set)
        self.thread.join()
