"""Exceptions and warnings. A wrong argument raises a ``ValueError`` or ``TypeError``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class UnsupportedProblem(NotImplementedError):
    """None of the allowed backends can run this attention.

    ``problem`` describes the call. ``reasons`` maps the name of each allowed backend to its reasons
    for refusing. The message contains both.
    """

    def __init__(self, problem: str, reasons: Mapping[str, Sequence[str]]) -> None:
        self.problem = problem
        self.reasons = {name: tuple(why) for name, why in reasons.items()}
        super().__init__(self._message())

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.problem, self.reasons)

    def _message(self) -> str:
        width = max((len(name) for name in self.reasons), default=0)
        lines = ["no backend can run this attention"]
        lines += [f"  {line}" for line in self.problem.splitlines()]
        for name, why in self.reasons.items():
            for index, sentence in enumerate(why):
                lines.append(f"  {name if index == 0 else '':<{width}}  {sentence}")
        return "\n".join(lines)


class CompileError(RuntimeError):
    """A kernel did not compile. Contains the compiler's log and the path of the source."""

    def __init__(self, what: str, log: str, source_path: str) -> None:
        self.what = what
        self.log = log
        self.source_path = source_path
        super().__init__(f"{what}\n  source: {source_path}\n{log.rstrip()}")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.what, self.log, self.source_path)


class CodeObjectError(RuntimeError):
    """A code object is damaged, is for another device, or fails one of pyfa's checks, for example
    because it uses scratch memory."""


class RankError(RuntimeError):
    """Another rank died, hung or is at a different step. The message says what this rank waited
    for."""


class PerformanceWarning(UserWarning):
    """The environment keeps the backend of the GPU's vendor (``hip`` or ``cuda``) from running.
    ``PYFA_STRICT=1`` makes it an error."""
