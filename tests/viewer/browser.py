"""A headless Chromium, spoken to in its own protocol: enough of it to press keys, run scripts and take pictures."""

import base64
import json
import re
import shutil
import subprocess

from tornado import websocket

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--remote-debugging-port=0", "--hide-scrollbars", "--window-size=1280,860"]  # fmt: skip


class Browser:
    """One tab. Use as an async context; `errors` gathers what the page complained about, the CSP included."""

    def __init__(self, folder):
        self.folder, self.errors, self.number = folder, [], 0

    async def __aenter__(self):
        self.process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={self.folder}"], stderr=subprocess.PIPE, text=True
        )
        for line in self.process.stderr:
            if found := re.search(r"listening on (ws://\S+)", line):
                break
        self.socket = await websocket.websocket_connect(found[1], max_message_size=2**28)
        target = await self.call("Target.createTarget", url="about:blank")
        self.session = (await self.call("Target.attachToTarget", flatten=True, **target))["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable", session=True)
        return self

    async def __aexit__(self, *_):
        self.socket.close()
        self.process.terminate()
        self.process.wait(30)
        self.process.stderr.close()

    async def call(self, method, *, session=False, **params):
        """Sends a command and waits for its answer; events in between are looked through for complaints."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        await self.socket.write_message(json.dumps(message | ({"sessionId": self.session} if session else {})))
        while True:
            answer = json.loads(await self.socket.read_message())
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(answer["params"])
            if answer.get("method") == "Network.requestWillBeSent":
                self.errors += [
                    url for url in [answer["params"]["request"]["url"]] if not url.startswith(("file:", "http://127."))
                ]

    async def open(self, url):
        await self.call("Page.navigate", session=True, url=url)
        while await self.run("document.readyState") != "complete" or await self.run("location.href") != url:
            pass

    async def run(self, script):
        """The value of a script."""
        found = await self.call("Runtime.evaluate", session=True, expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def press(self, *keys):
        for key in keys:
            text = key if len(key) == 1 else {"Enter": "\r"}.get(key, "")
            kind = "keyDown" if text else "rawKeyDown"
            await self.call("Input.dispatchKeyEvent", session=True, type=kind, key=key, text=text)
            await self.call("Input.dispatchKeyEvent", session=True, type="keyUp", key=key)

    async def picture(self, path):
        found = await self.call("Page.captureScreenshot", session=True, format="png")
        path.write_bytes(base64.b64decode(found["data"]))
