"""`vllm-dspark serve` as a user runs it: a real server process and the `openai` client."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import ENGINE_ENVIRONMENT, engine, token_lists
from tests.support.metrics_pages import check_catalog, scrape
from tests.support.pairs import Pair, PairSpec
from tests.support.patience import PATIENCE_S, free_port, wait_until
from tests.support.terminal import OnTerminal
from vllm_dspark.demo.client import parse_counters

pytestmark = pytest.mark.engine

PROMPTS = ("The sea is", "def add(a, b):", "1 + 2 + 3 =", "Once upon a time")
MAX_TOKENS = 40


def serve_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "vllm_dspark.cli", "serve", *arguments]


def server_environment() -> dict[str, str]:
    """A user's environment: engine core and worker in processes of their own, runner not forced."""
    tests_only = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER")
    environment = {k: v for k, v in os.environ.items() if k not in tests_only}
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS")
    return environment | {name: ENGINE_ENVIRONMENT[name] for name in offline}


def get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def processes_of_session(session: int) -> list[int]:
    """Processes of a session that are still running (zombies left out)."""
    alive = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            alive.append(int(stat.parent.name))
    return alive


class RunningServer:
    def __init__(self, process: subprocess.Popen, port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def wait_until_ready(self) -> None:
        wait_until(f"the server that writes {self.log}", self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            return get(self.port, "/health")[0] == http.client.OK
        except OSError:
            return False


@pytest.fixture(scope="module")
def pair(build: Any) -> Pair:
    return build(PairSpec(kind="markov"))


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[list[int]]:
    """Greedy tokens of vLLM without speculation."""
    from vllm import SamplingParams

    with engine(pair.target) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        return token_lists(llm.generate(list(PROMPTS), params, use_tqdm=False))


@pytest.fixture(scope="module")
def server(
    pair: Pair, expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """The server under test; `expected` comes first, so that only one engine lives at a time."""
    log = tmp_path_factory.mktemp("serve") / "server.log"
    port = free_port()
    speculative = {
        "method": "dspark",
        "model": str(pair.drafter),
        "num_speculative_tokens": 7,
        # step costs are measured at start as for any user, but what a busy machine makes of them
        # must not decide whether anything is drafted and accepted
        "dspark": {"request_floor": 7, "skip_draft": False, "draft_width": "full"},
    }
    command = serve_command(
        str(pair.target), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--served-model-name", "tiny", "--enforce-eager", "--max-model-len", "512",
        "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20),
        "--speculative-config", json.dumps(speculative),
    )  # fmt: skip
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=server_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = RunningServer(process, port, log)
    try:
        running.wait_until_ready()
        yield running
    finally:
        for pid in processes_of_session(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def client(server: RunningServer) -> Any:
    from openai import OpenAI

    return OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused", timeout=PATIENCE_S
    )


REQUEST = {
    "model": "tiny",
    "temperature": 0.0,
    "max_tokens": MAX_TOKENS,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}


def test_complete_answers_equal_those_without_speculation(
    client: Any, expected: list[list[int]]
) -> None:
    """Catches a served token that plain vLLM would not have produced."""
    got = []
    for prompt in PROMPTS:
        answer = client.completions.create(prompt=prompt, **REQUEST)
        got.append(answer.choices[0].token_ids)
        assert answer.usage.completion_tokens == MAX_TOKENS
    assert got == expected


def test_streamed_answers_equal_those_without_speculation(
    client: Any, expected: list[list[int]]
) -> None:
    """Catches tokens lost or repeated when a chunk carries several; some chunk must."""
    widest = 0
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        chunks = []
        for event in client.completions.create(prompt=prompt, stream=True, **REQUEST):
            chunks += [choice.token_ids or [] for choice in event.choices]
        assert [token for chunk in chunks for token in chunk] == tokens
        widest = max(widest, *map(len, chunks))
    assert widest > 1, "no chunk carried more than one token: nothing was accepted"


def test_chat_answers(client: Any) -> None:
    """Catches a chat route that speculation breaks."""
    messages = [{"role": "user", "content": "The sea is"}]
    answer = client.chat.completions.create(messages=messages, **REQUEST)
    assert len(answer.choices[0].token_ids) == MAX_TOKENS


def test_metrics_are_reachable(client: Any, server: RunningServer) -> None:
    """Catches counters that stay at zero, or a /metrics that does not answer."""
    client.completions.create(prompt=PROMPTS[0], **REQUEST)
    status, text = get(server.port, "/metrics")
    counters = parse_counters(text)
    assert status == http.client.OK
    assert counters.request_steps > 0
    assert counters.drafted >= counters.request_steps
    assert 0 < counters.accepted <= counters.drafted
    check_catalog(scrape(f"http://127.0.0.1:{server.port}"), 7)


def top_command(port: int, *arguments: str) -> list[str]:
    address = f"127.0.0.1:{port}"
    return [sys.executable, "-m", "vllm_dspark.cli", "top", address, *arguments]


def test_top_agrees_with_the_server(client: Any, server: RunningServer) -> None:
    """Catches figures of `top` that are not those of the page it reads, on a real page."""
    client.completions.create(prompt=PROMPTS[0], **REQUEST)
    page = get(server.port, "/metrics")[1]
    done = subprocess.run(
        top_command(server.port, "--once", "--interval", "0", "--json"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    (figures,) = json.loads(done.stdout)["engines"]
    assert (figures["model"], figures["width"]) == ("tiny", 7)
    emitted, steps = (
        float(re.findall(rf"^vllm:dspark_{name}_total{{.*}} (.*)$", page, re.MULTILINE)[0])
        for name in ("emitted_tokens", "request_steps")
    )
    assert figures["accepted_length"] == pytest.approx(emitted / steps)
    assert sum(figures["windows"].values()) == pytest.approx(1.0)
    assert sum(figures["kinds"].values()) == pytest.approx(1.0)
    assert 0.0 < figures["acceptance"][0] <= 1.0


def test_top_watches_a_server_under_load(client: Any, server: RunningServer) -> None:
    """Catches a live view that shows no rates, or that Ctrl-C ends with a stack trace."""
    with OnTerminal(top_command(server.port, "--interval", "0.5")) as top:

        def moved() -> bool:
            assert top.process.poll() is None, top.shown()
            client.completions.create(prompt=PROMPTS[0], **REQUEST)
            rates = re.findall(r"tokens/s +([\d.]+)", top.shown())
            return max(map(float, rates), default=0.0) > 0.0

        wait_until("a rate above zero", moved, pause=0.0)
        code, errors = top.interrupt()
        assert code == 130, errors
        assert errors == ""
        assert "tiny" in top.shown()


def test_bad_request_is_refused_and_the_server_lives_on(client: Any) -> None:
    """Catches a request error that takes the engine down."""
    from openai import BadRequestError

    with pytest.raises(BadRequestError):
        client.completions.create(prompt="x", **{**REQUEST, "max_tokens": 100_000})
    assert client.completions.create(prompt="x", **REQUEST).choices[0].token_ids


def test_sigterm_ends_every_process(server: RunningServer) -> None:
    """Catches a signal that stops at our command, and processes left behind. Must run last."""
    assert len(processes_of_session(server.process.pid)) > 1
    server.process.terminate()
    assert server.process.wait(PATIENCE_S) == 0
    wait_until("all have ended", lambda: not processes_of_session(server.process.pid))


BAD_OPTION = '{"method": "dspark", "model": "DRAFTER", "dspark": {"windos": "host"}}'


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--speculative-config", BAD_OPTION],
         "dspark.windos = 'host': unknown option; did you mean 'windows'?"),
    ],
)  # fmt: skip
def test_bad_arguments(pair: Pair, changes: list[str], message: str) -> None:
    """Catches a bad option that is ignored, or reported by a stack trace alone."""
    given = [change.replace("DRAFTER", str(pair.drafter)) for change in changes]
    done = run_to_end(str(pair.target), *given)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_model(tmp_path: Path) -> None:
    """Catches a missing model that ends with exit code 0, or without naming it."""
    done = run_to_end(str(tmp_path / "no-such-model"))
    assert done.returncode != 0
    assert "no-such-model" in done.stderr


def run_to_end(*arguments: str) -> subprocess.CompletedProcess:
    command = serve_command(*arguments, "--port", str(free_port()), "--max-model-len", "512")
    return subprocess.run(
        command,
        env=server_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
