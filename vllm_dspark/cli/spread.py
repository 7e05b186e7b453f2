"""Replicas of a measuring engine as Ray actors, and tasks that survive the death of one.

A task is done by one replica from beginning to end, and its result counts when it has come back
whole: what a killed replica had half done is lost with its process, so redoing the task elsewhere
neither loses nor doubles anything. Every replica is one engine (with all its GPUs).
"""

from __future__ import annotations

import importlib.util
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_dspark.artifacts.store import why_unwritable
from vllm_dspark.errors import DSparkError, EngineError, InputError

logger = logging.getLogger(__name__)

INSTALL_HINT = "--ray needs Ray: pip install 'vllm-dspark[ray]'"
# A task that brought down this many replicas will bring down the next one too.
_MAX_ATTEMPTS = 3


@dataclass(frozen=True)
class RayPlace:
    """Where replicas run. address: "auto" (a running cluster), "local", or a cluster's address.

    replicas: 0 means as many as the cluster's GPUs allow, or one per node without GPUs.
    environment: variables that replicas get on top of their node's own.
    """

    address: str
    replicas: int = 0
    gpus_per_replica: int = 0
    cpus_per_replica: float = 1.0
    environment: Mapping[str, str] = field(default_factory=dict)


class RayReplicas:
    """A fixed number of replicas; a context manager.

    factory: class of the replica; arguments: for its constructor. Its methods `describe()` and
    `run(task)` are called, and whatever `broadcast` names.
    """

    def __init__(self, place: RayPlace, factory: type, arguments: Sequence[Any]) -> None:
        if importlib.util.find_spec("ray") is None:
            raise InputError(INSTALL_HINT)
        import ray

        self._ray = ray
        self._place = place
        self._owned = not ray.is_initialized()
        if self._owned:
            try:
                ray.init(address=place.address, log_to_driver=False, logging_level=logging.WARNING)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise InputError(
                    f"no Ray cluster at {place.address!r}: {error}; start one with `ray start "
                    '--head`, or give "local"'
                ) from error
        self._factory: Any = ray.remote(factory)
        self._arguments = tuple(arguments)
        self.count = place.replicas or self._fitting()
        self.restarts = 0  # replicas that died and were replaced
        self._actors = [self._start() for _ in range(self.count)]

    def _fitting(self) -> int:
        if self._place.gpus_per_replica:
            gpus = int(self._ray.cluster_resources().get("GPU", 0))
            if gpus < self._place.gpus_per_replica:
                raise InputError(
                    f"the Ray cluster has {gpus} GPUs, one replica needs "
                    f"{self._place.gpus_per_replica}"
                )
            return gpus // self._place.gpus_per_replica
        return sum(1 for node in self._ray.nodes() if node["Alive"])

    def _start(self) -> Any:
        options = self._factory.options(
            num_cpus=self._place.cpus_per_replica,
            num_gpus=self._place.gpus_per_replica,
            runtime_env={"env_vars": dict(self._place.environment)},
            max_restarts=0,  # a restarted actor would not know which tasks were its own
        )
        return options.remote(*self._arguments)

    def describe(self) -> list[Any]:
        """Every replica's `describe()`, once its engine is up."""
        return self.broadcast("describe")

    def broadcast(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on every replica; a replica that dies meanwhile is replaced and asked."""
        answers = []
        for slot in range(self.count):
            for attempt in range(_MAX_ATTEMPTS):
                call = getattr(self._actors[slot], method).remote(*arguments)
                try:
                    answers.append(self._ray.get(call))
                    break
                except self._ray.exceptions.RayTaskError as error:
                    raise _cause(error) from error
                except self._ray.exceptions.RayActorError as error:
                    self._replace(slot, attempt + 1, error)
        return answers

    def map(self, tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """(index of the task, result of `run`) as they finish; each index exactly once."""
        waiting = deque(enumerate(tasks))
        attempts = dict.fromkeys(range(len(tasks)), 0)
        idle = list(range(self.count))
        running: dict[Any, tuple[int, Any, int]] = {}
        while waiting or running:
            while waiting and idle:
                index, task = waiting.popleft()
                slot = idle.pop()
                running[self._actors[slot].run.remote(task)] = (index, task, slot)
            (ready, *_), _ = self._ray.wait(list(running), num_returns=1)
            index, task, slot = running.pop(ready)
            try:
                result = self._ray.get(ready)
            except self._ray.exceptions.RayTaskError as error:
                raise _cause(error) from error
            except self._ray.exceptions.RayActorError as error:
                attempts[index] += 1
                self._replace(slot, attempts[index], error)
                waiting.appendleft((index, task))
            else:
                yield index, result
            idle.append(slot)

    def _replace(self, slot: int, attempt: int, error: Exception) -> None:
        if attempt >= _MAX_ATTEMPTS:
            raise EngineError(f"{attempt} replicas died in a row at the same work: {error}")
        logger.warning("a replica died, its work is done again: %s", str(error).splitlines()[0])
        self.restarts += 1
        self._actors[slot] = self._start()

    def close(self) -> None:
        """Stop the replicas, and the Ray that was started or joined here."""
        for actor in self._actors:
            self._ray.kill(actor)
        if self._owned:
            self._ray.shutdown()

    def __enter__(self) -> RayReplicas:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cause(error: Any) -> Exception:
    """The replica's own error, where it is one of ours."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, DSparkError) else EngineError(str(error))


class LocalReplica:
    """The same interface with one replica in this process; results come in order."""

    def __init__(self, factory: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self.count, self.restarts = 1, 0
        self.replica = factory(*arguments)

    def describe(self) -> list[Any]:
        """The replica's `describe()`, in a list."""
        return [self.replica.describe()]

    def broadcast(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the replica."""
        return [getattr(self.replica, method)(*arguments)]

    def map(self, tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """(index of the task, result of `run`), one after the other."""
        for index, task in enumerate(tasks):
            yield index, self.replica.run(task)

    def close(self) -> None:
        """Close the replica."""
        self.replica.close()

    def __enter__(self) -> LocalReplica:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Replicas = LocalReplica | RayReplicas


def make_replicas(place: RayPlace | None, factory: type, arguments: Sequence[Any]) -> Replicas:
    """Replicas in a Ray cluster, or one here."""
    if place is None:
        return LocalReplica(factory, arguments)
    return RayReplicas(place, factory, arguments)


def require_cache(identity: Mapping[str, Any], place: RayPlace | None) -> None:
    """Raise InputError before minutes of work that could not be kept; actors are not asked."""
    if place is None:
        file = Path(identity["cache_dir"]) / "artifact.json"
        if why := why_unwritable(file):  # unlike a user's file, its folder is made
            raise InputError(f"cannot write {file}: {why}")


def one_identity(descriptions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The description that all replicas share; InputError where machines or models differ."""
    from vllm_dspark.artifacts.fingerprint import Fingerprint

    first = descriptions[0]
    wanted = Fingerprint.model_validate(first["fingerprint"])
    for other in descriptions[1:]:
        differences = wanted.differences(Fingerprint.model_validate(other["fingerprint"]))
        if differences:
            raise InputError(
                f"replicas {first['replica']} and {other['replica']} differ, their measurements "
                f"cannot be mixed: {'; '.join(differences)}; run the command once per kind of "
                "machine"
            )
    return first
