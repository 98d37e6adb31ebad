"""Every ``PYFA_*`` environment variable, in one table, which the code, the README and ``pyfa info``
read.

Variables are read when they are needed, so that tests and programs may set them late. Code on a hot
path reads a variable once, and the variable's description says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("", "0", "false", "no", "off"):
        return False
    raise ValueError("expected 1 or 0")


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(Path(part).expanduser() for part in text.split(os.pathsep) if part)


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, how its text is parsed, its effect."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    form: str
    meaning: str


VARIABLES: dict[str, Variable] = {
    variable.name: variable
    for variable in (
        Variable(
            "PYFA_BACKEND",
            _names,
            (),
            "names, in order",
            "Backends to try, such as `triton,torch`. `backend=` and `use_backend` override it. "
            "Read once, when the first attention runs.",
        ),
        Variable(
            "PYFA_BATCH_INVARIANT",
            _flag,
            False,
            "0 or 1",
            "Make every call `batch_invariant`. `use_batch_invariant` overrides it. Read once, at "
            "import.",
        ),
        Variable(
            "PYFA_STRICT",
            _flag,
            False,
            "0 or 1",
            "Make `PerformanceWarning` an error: for jobs that must not fall back because of the "
            "environment, such as a missing compiler. To exclude every fallback, select the "
            "backend.",
        ),
        Variable(
            "PYFA_CHECK",
            _flag,
            False,
            "0 or 1",
            "Check values that are on the device: `cu_seqlens`, `seqused`, cache lengths, "
            "page-table entries and the bytes of boolean masks. Each check waits for the device. "
            "Read once, at import.",
        ),
        Variable(
            "PYFA_LOG",
            str,
            "",
            "`plan`",
            "`plan` logs each new plan once to the logger `pyfa`, at level INFO.",
        ),
        Variable(
            "PYFA_VLLM_CPU",
            _flag,
            False,
            "0 or 1",
            "Make vLLM use pyfa on a CPU instead of its backend `CPU_ATTN`; on a CPU, vLLM "
            "ignores `--attention-backend`. Read when vLLM loads its plug-ins.",
        ),
        Variable(
            "PYFA_ARCH_TILES",
            str,
            "",
            "an NVIDIA arch",
            "Make the cuda backend use the tile sizes of another arch, such as `sm_86`, to test "
            "them without such a GPU. Read at each new plan.",
        ),
        Variable(
            "PYFA_EMULATOR_SEED",
            int,
            0,
            "a number",
            "The seed of the order in which the `emulator` backend runs workgroups, wavefronts and "
            "atomics. A seed other than 0 also changes the order of the products inside a matrix "
            "instruction and the last bit of exp, log, rcp, rsq and sqrt. A failing conformance "
            "case reports its seed. Read at each launch.",
        ),
        Variable(
            "PYFA_CACHE_DIR",
            lambda text: Path(text).expanduser(),
            None,
            "a folder",
            "The folder for compiled kernels; by default the user's cache folder.",
        ),
        Variable(
            "PYFA_CACHE_READONLY_DIRS",
            _paths,
            (),
            "folders",
            "More caches to search, separated by `:`. They are read, never written.",
        ),
    )
}


def get(name: str) -> Any:
    """Return the parsed value of ``name``; its default if it is unset or empty.

    Raises ``ValueError`` naming the variable if its text cannot be parsed.
    """
    variable = VARIABLES[name]
    text = os.environ.get(name, "")
    if not text:
        return variable.default
    try:
        return variable.parse(text)
    except (ValueError, RuntimeError) as error:  # RuntimeError: "~nobody" has no home
        raise ValueError(f"environment variable {name}={text!r}: {error}") from None
