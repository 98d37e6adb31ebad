"""The kernels' sources: their folder, and one self-contained text per kernel and plan."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*\n", re.MULTILINE)


# A plan without mods keeps its digest when their header changes.
_PLAIN = {"mods.h": ""}


def directory() -> Path:
    """Return the folder of the kernels: inside an installed package, or next to it in a checkout.

    Raises ``FileNotFoundError`` if neither exists.
    """
    package = Path(__file__).parent
    for folder in (package / "_kernels", package.parent / "kernels"):
        if (folder / "params.h").is_file():
            return folder
    raise FileNotFoundError(f"the kernels' sources are neither in {package} nor next to it")


def flatten(
    kernel: str, constants: Mapping[str, int | str], generated: Mapping[str, str] | None = None
) -> str:
    """Return one source text: ``constants`` as #defines, then ``kernel`` with its includes inlined.

    ``generated`` holds texts that replace included files, by the names of these files. By default
    the kernel has no mods, and the code that mods need is left out.

    ``kernel`` is a path below the folder of the kernels, such as "hip/attn_fwd.hip". Includes are
    searched next to the including file, then in the top folder; each file is included once. The
    text, and so its digest, does not depend on the location of the folder. Raises
    ``FileNotFoundError`` naming the include that is missing.
    """
    root = directory().resolve()
    defines = "".join(f"#define {name} {value}\n" for name, value in sorted(constants.items()))
    plain = _PLAIN if generated is None else generated
    return defines + _expand(f"{root}/{kernel}", str(root), set(), plain)


def _expand(file: str, root: str, taken: set[str], generated: Mapping[str, str]) -> str:
    # Paths are texts: pathlib's took half of the time, 2 ms of a plan's first call.
    taken.add(file)
    name = file[len(root) + 1 :]

    def replace(match: re.Match[str]) -> str:
        made = generated.get(match[1].rsplit("/", 1)[-1])
        if made is not None:
            return made
        for folder in (os.path.dirname(file), root):
            wanted = os.path.normpath(f"{folder}/{match[1]}")
            if os.path.isfile(wanted):
                return "" if wanted in taken else _expand(wanted, root, taken, generated)
        raise FileNotFoundError(f'{name} includes "{match[1]}", which is not there')

    with open(file) as opened:
        text = _ONCE.sub("", opened.read())
    return f'#line 1 "{name}"\n' + _INCLUDE.sub(replace, text)


def keep_failed(source: str, suffix: str) -> str:
    """Write a source that did not compile to a file, so that the error can name this file. Return
    its path."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="pyfa-failed-", suffix=suffix, delete=False, encoding="utf-8"
    ) as kept:
        kept.write(source)
        return kept.name
