"""Reading a server again and again, or once."""

import json
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from rich.console import Console
from rich.live import Live

from vllm_dspark.cli.top.figures import EngineFigures, figures_of
from vllm_dspark.cli.top.scrape import Snapshot, changes, fetch, parse
from vllm_dspark.cli.top.view import render
from vllm_dspark.errors import InputError, ScrapeError

Read = Callable[[str], str]
Sleep = Callable[[float], None]


def metrics_url(server: str) -> str:
    """`localhost:8000`, `http://host:8000` or the address of a metrics page; raises InputError."""
    url = server if "://" in server else f"http://{server}"
    try:
        parts = urlsplit(url)
        legal = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is none, half an IPv6 address
        legal = False
    if not legal or any(c.isspace() for c in server):
        raise InputError(
            f"{server!r} is no address of a server; write HOST:PORT or http://HOST:PORT"
        )
    base = url.rstrip("/")
    return base if base.endswith("/metrics") else f"{base}/metrics"


def plugin_absent(url: str, engines: Sequence[EngineFigures]) -> str:
    """What to say where no engine publishes metrics of the plugin; empty where one does."""
    if any(engine.scheduling is not None for engine in engines):
        return ""
    return (
        f"{url} has vLLM's metrics, but no vllm:dspark_* ones: the plugin is absent or off, or its "
        'metrics are ("metrics": false); the log of the server says which'
    )


def read_once(
    url: str, interval_s: float, read: Read = fetch, sleep: Sleep = time.sleep
) -> list[EngineFigures]:
    """Figures of one period; `interval_s` 0: since the engines started. Raises ScrapeError."""
    first = None
    if interval_s > 0:
        first = parse(read(url))
        sleep(interval_s)
    return figures_of(changes(first, parse(read(url))))


def watch(
    url: str,
    interval_s: float,
    console: Console,
    read: Read = fetch,
    sleep: Sleep = time.sleep,
    rounds: int | None = None,
) -> None:
    """Show a live view until interrupted; a server that goes away is waited for.

    rounds: readings to make; None: no end. Raises ScrapeError if the first one fails.
    """
    before: Snapshot | None = parse(read(url))
    shown = figures_of(changes(None, before))  # type: ignore[arg-type]
    with Live(render(url, shown), console=console, auto_refresh=False) as live:
        made = 1
        while rounds is None or made < rounds:
            sleep(interval_s)
            made += 1
            try:
                now = parse(read(url))
            except ScrapeError as error:
                live.update(render(url, shown, f"no answer, trying again: {error}"), refresh=True)
                continue
            shown = figures_of(changes(before, now))
            before = now
            live.update(render(url, shown), refresh=True)


def as_json(url: str, engines: list[EngineFigures]) -> str:
    """One JSON object."""
    found = [engine.as_json() for engine in engines]
    return json.dumps({"kind": "top", "version": 1, "url": url, "engines": found}, indent=1)
