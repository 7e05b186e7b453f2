"""Check of the flags and keys that vLLM does not know, or completes by itself."""

from collections.abc import Callable, Iterator

from vllm_dspark.cli.doctor.findings import Finding
from vllm_dspark.cli.doctor.subject import Subject
from vllm_dspark.cli.doctor.vllm_flags import VllmFlags, vllm_flags


def check_flags(subject: Subject) -> Iterator[Finding]:
    """Flags, and keys of --config, that vLLM does not know or completes by itself."""
    flags = vllm_flags()
    if flags is None:
        return  # without vLLM nothing is known about its flags
    arguments = subject.arguments
    for word in arguments.unread:
        if word.startswith("--") and word != "--":
            yield from _check(word.partition("=")[0], str, flags)
    for key in arguments.config_keys:
        yield from _check(f"--{key}", _as_key, flags)
    for option, whole in arguments.completed:
        yield _completed(option, whole, str)


def _as_key(option: str) -> str:
    """An option as it stands in a --config file."""
    return f'"{option[2:]}" in the --config file'


def _check(option: str, shown: Callable[[str], str], flags: VllmFlags) -> Iterator[Finding]:
    """One word, which `shown` writes as the user has."""
    found = flags.matches(option)
    if option in flags.options:
        return
    if len(found) == 1:
        yield _completed(option, found[0], shown)
    elif found:
        several = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
        yield Finding(
            "flags",
            "error",
            f"{shown(option)} may be {several}",
            "vLLM completes a name only if it can be one flag, and would not start",
            f"the one that is meant, in full: {several}",
        )
    else:
        yield _unknown(option, shown, flags)


def _completed(option: str, whole: str, shown: Callable[[str], str]) -> Finding:
    return Finding(
        "flags",
        "info",
        f"{shown(option)} is read as {whole}",
        "vLLM completes names as long as only one flag begins so; the next version may have two",
        f"{whole} in full",
    )


def _unknown(option: str, shown: Callable[[str], str], flags: VllmFlags) -> Finding:
    near = flags.nearest(option)
    return Finding(
        "flags",
        "error" if flags.complete else "warning",
        f"{shown(option)} is no flag of vllm serve" + (f"; did you mean {near}?" if near else ""),
        "vLLM would not start (unrecognized arguments)"
        if flags.complete
        else "vLLM would not start, unless the installed platform plugin adds it",
        f"{near} instead" if near else f"leave out {shown(option)}",
    )
