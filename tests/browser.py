"""Chromium without a window, for the tests of pages: the few commands of its DevTools protocol that they need."""
import base64
import contextlib
import json
import os
import shutil
import subprocess
import time

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """A page in Chromium, which is told what to do through a pair of pipes: its file descriptors 3 and 4."""

    def __init__(self, profile):
        """profile: a folder that Chromium may write into."""
        to_read, self.commands = os.pipe()
        answers, to_write = os.pipe()

        def as_chromium_names_them():
            os.dup2(to_read, 100)  # so that neither is closed when it becomes the other's number
            os.dup2(to_write, 101)
            os.dup2(100, 3)
            os.dup2(101, 4)

        self.process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run", "about:blank"],
            preexec_fn=as_chromium_names_them, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self.answers, self.number, self.session = open(answers, "rb", buffering=0), 0, None
        self.waiting, self.events = b"", []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.commands)
        self.answers.close()

    def _message(self):
        while b"\0" not in self.waiting:
            more = self.answers.read(1 << 20)
            assert more, "Chromium has ended"
            self.waiting += more
        message, _, self.waiting = self.waiting.partition(b"\0")
        return json.loads(message)

    def command(self, method, **parameters):
        """The result of a command of the protocol. What Chromium tells meanwhile goes into self.events."""
        self.number += 1
        message = dict(id=self.number, method=method, params=parameters)
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer}"
                return answer["result"]
            self.events.append(answer)

    def evaluate(self, script):
        """The value of a script in the page, of which it awaits a promise."""
        answer = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script):
        """Wait until the value of a script is true, which even on the busiest machine takes no hour."""
        end = time.monotonic() + 3600
        while not self.evaluate(script):
            assert time.monotonic() < end, f"after an hour it is still not so: {script}"
            time.sleep(0.02)

    def open(self, path):
        self.events.clear()
        self.command("Page.navigate", url=f"file://{path}")

    def complaints(self):
        """What the page put into the console, exceptions that it threw, and requests that it made beyond its own file."""
        told = {"Runtime.consoleAPICalled": "args", "Runtime.exceptionThrown": "exceptionDetails", "Log.entryAdded": "entry"}
        said = [event["params"][told[event["method"]]] for event in self.events if event["method"] in told]
        urls = [event["params"]["request"]["url"] for event in self.events
                if event["method"] == "Network.requestWillBeSent"]
        return said + [url for url in urls if not url.startswith(("file:", "blob:", "data:"))]

    def screenshot(self, path, width, height, scheme="light", scale=1):
        """Write the page as a PNG, as a window of this size shows it, in a light or a dark scheme."""
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                     mobile=width < 600)
        self.command("Emulation.setEmulatedMedia", features=[dict(name="prefers-color-scheme", value=scheme)])
        picture = self.command("Page.captureScreenshot", captureBeyondViewport=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(picture["data"]))


@contextlib.contextmanager
def browser(profile):
    """A Browser that is ended when its block is."""
    opened = Browser(profile)
    try:
        yield opened
    finally:
        opened.close()
