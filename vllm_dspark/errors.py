"""Error types of the plugin.

Every message states the cause, the value that was seen and the remedy. Errors
meant for users derive from ``ValueError`` so that vLLM's own start-up code
reports them like any other bad setting.
"""


class DSparkError(Exception):
    """Base of every error raised by vllm-dspark."""


class DSparkConfigError(DSparkError, ValueError):
    """A `"dspark": {...}` option is unknown, of the wrong type or out of range."""


class ContractError(DSparkError):
    """The installed vLLM lacks an attribute or signature that the plugin relies on."""


class ArtifactError(DSparkError, ValueError):
    """A persisted record is unreadable, illegal or belongs to another machine."""


class CalibrationError(ArtifactError):
    """A calibration does not fit the drafter or holds illegal temperatures."""


class CostTableError(ArtifactError):
    """A cost table cannot price steps; `reason` is a stable machine-readable word."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"cost table refused ({reason}): {message}")
        self.reason = reason


class PlanError(DSparkError):
    """A plan was asked for, or handed over, with facts that contradict each other."""


class DrafterError(DSparkError, ValueError):
    """A drafter's config, weights or buffers cannot be used as they are."""


class EngineError(DSparkError, RuntimeError):
    """An engine that a command needs did not start, died or does not answer."""


class InputError(DSparkError, ValueError):
    """A file or folder that the user named holds something else than what is asked for."""


class UntrustedError(DSparkError):
    """A measurement ran, but its result must not be used: noise, or too little data."""


class TraceError(InputError):
    """A trace cannot be read, or cannot answer what is asked of it."""


class SimulationError(DSparkError, ValueError):
    """A simulation was asked for with settings that contradict each other."""


class ScrapeError(DSparkError, RuntimeError):
    """A server's metrics cannot be had."""
