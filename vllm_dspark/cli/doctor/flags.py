"""Check of the flags and keys that vLLM does not know, or completes by itself."""

from collections.abc import Iterator

from vllm_dspark.cli.doctor.findings import Finding
from vllm_dspark.cli.doctor.subject import Subject
from vllm_dspark.cli.doctor.vllm_flags import VllmFlags, vllm_flags


def check_flags(subject: Subject) -> Iterator[Finding]:
    """Flags, and keys of --config, that vLLM does not know or completes by itself."""
    flags = vllm_flags()
    if flags is None:
        return  # without vLLM nothing is known about its flags
    arguments = subject.arguments
    typed = [a.partition("=")[0] for a in arguments.unread if a.startswith("--") and a != "--"]
    keys = [f"--{key}" for key in arguments.config_keys]
    for option, place in [*((o, "") for o in typed), *((k, " in the --config file") for k in keys)]:
        found = flags.matches(option)
        if option in flags.options:
            continue
        if len(found) == 1:
            yield _completed(option, found[0], place)
        elif found:
            yield Finding(
                "flags",
                "error",
                f"{option}{place} may be {', '.join(found[:4])}{' ...' * (len(found) > 4)}",
                "vLLM completes a name only if it can be one flag, and would not start",
                f"{found[0]} in full",
            )
        else:
            yield _unknown(option, place, flags)
    for option, whole in arguments.completed:
        yield _completed(option, whole, "")


def _completed(option: str, whole: str, place: str) -> Finding:
    return Finding(
        "flags",
        "info",
        f"{option}{place} is read as {whole}",
        "vLLM completes names as long as only one flag begins so; the next version may have two",
        f"{whole} in full",
    )


def _unknown(option: str, place: str, flags: VllmFlags) -> Finding:
    near = flags.nearest(option)
    return Finding(
        "flags",
        "error" if flags.complete else "warning",
        f"{option}{place} is no flag of vllm serve" + (f"; did you mean {near}?" if near else ""),
        "vLLM would not start (unrecognized arguments)"
        if flags.complete
        else "vLLM would not start, unless the installed platform plugin adds it",
        f"{near} instead of {option}" if near else f"leave out {option}",
    )
