"""How tests wait: for an event, up to a limit that only a hang can reach.

A limit says nothing about how long something should take. Without any bytecode cache and beside
four busy loops on two cores, the slowest fixture that was tried took less than a quarter of it.
"""

import random
import socket
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 1200.0

# What else gives up on a slow machine: vLLM's parent processes, and Ray, which takes replicas,
# proxies, workers and nodes for dead when they do not answer within seconds. Read when these
# packages are imported, also by the processes that they start.
PATIENT_ENVIRONMENT = {
    "VLLM_ENGINE_READY_TIMEOUT_S": f"{PATIENCE_S:.0f}",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": f"{PATIENCE_S:.0f}",
    "RAY_SERVE_LLM_DEFAULT_HEALTH_CHECK_TIMEOUT_S": "300",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "300",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_gcs_server_request_timeout_seconds": "600",
    "RAY_health_check_timeout_ms": "300000",
    # nor may Ray end its workers because other programs have most of the memory
    "RAY_memory_monitor_refresh_ms": "0",
}

# Where the kernel takes ports from for whoever asks for none in particular (Linux: from 32768 on);
# Ray's workers have theirs below 20000.
_PORTS = range(20_000, 32_000)


def wait_until(
    what: str, holds: Callable[[], Any], seconds: float = PATIENCE_S, pause: float = 0.2
) -> Any:
    """Call `holds` until it returns something true, and return that.

    `holds` raises if waiting has become pointless (a process has ended, say).
    """
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(pause)
    return found


def free_port() -> int:
    """A port for a server that is about to start.

    Not one that the kernel would choose: until the server binds it, a minute later perhaps, the
    kernel could choose it for something else too.
    """
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
