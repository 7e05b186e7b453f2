"""The HTML report in a real browser without a network, where one is installed."""

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_plot import FIGURES
from tests.support.patience import PATIENCE_S, free_port, wait_until
from vllm_dspark.cli.plot import run_plot

pytest.importorskip("matplotlib", reason="drawing needs the `plot` extra")
client = pytest.importorskip("websockets.sync.client", reason="speaks with the browser")

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed")

COUNT = """JSON.stringify({
  drawn: [...document.querySelectorAll("figure svg")]
    .filter(svg => svg.getBoundingClientRect().width > 200).length,
  texts: [...document.querySelectorAll("svg text")].map(text => text.textContent),
  loaded: performance.getEntriesByType("resource").length,
})"""


class Page:
    """One tab, spoken to by the DevTools protocol; `events` is what it said unasked."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._last = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        self._connection.send(json.dumps(message))
        while True:
            answer = json.loads(self._connection.recv(timeout=PATIENCE_S))
            if answer.get("id") == self._last:
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, method: str) -> None:
        while not any(event.get("method") == method for event in self.events):
            self.events.append(json.loads(self._connection.recv(timeout=PATIENCE_S)))


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    port = free_port()
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--no-zygote"]
    command += ["--single-process", "--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'u'}"]
    command += [f"--remote-debugging-port={port}", "--remote-allow-origins=*"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
        try:
            with client.connect(_tab(port), max_size=None, open_timeout=PATIENCE_S) as connection:
                yield Page(connection)
        finally:
            browser.kill()


def _tab(port: int) -> str:
    """Address of the first tab, once the browser is up."""

    def tabs() -> list[str]:
        address = f"http://127.0.0.1:{port}/json"
        try:
            with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
                found = json.load(answer)
        except OSError:
            return []
        return [tab["webSocketDebuggerUrl"] for tab in found if tab["type"] == "page"]

    first: str = wait_until("a tab of the browser", tabs)[0]
    return first


def test_report_opens_offline(page: Page, tmp_path: Path) -> None:
    """Catches a report that shows nothing, complains, or asks for anything but itself."""
    source, report = tmp_path / "result.json", tmp_path / "report.html"
    source.write_text(json.dumps({"command": "bench", "figures": FIGURES}))
    run_plot([source], None, report)
    for domain in ("Network", "Page", "Runtime", "Log"):
        page.call(f"{domain}.enable")
    page.call("Page.navigate", url=report.as_uri())
    page.wait_for("Page.loadEventFired")
    evaluated = page.call("Runtime.evaluate", expression=COUNT, returnByValue=True)
    found = json.loads(evaluated["result"]["value"])
    assert found["drawn"] == len(FIGURES)
    assert {"Frontier", "128 KV", "c=16", "Step <time>"} <= set(found["texts"])
    assert found["loaded"] == 0
    asked = [e["params"] for e in page.events if e.get("method") == "Network.requestWillBeSent"]
    assert {params["request"]["url"] for params in asked} == {report.as_uri()}
    bad = ("Log.entryAdded", "Runtime.exceptionThrown", "Network.loadingFailed")
    assert [event for event in page.events if event.get("method") in bad] == []
