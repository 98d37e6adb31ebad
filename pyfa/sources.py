"""The kernels' sources: their folder, and one self-contained text per kernel and plan."""

from __future__ import annotations

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

    ``generated``: texts that replace the included files of these names. By default the kernel has
    no mods, and the code that mods need is left out.

    ``kernel`` is a path below the folder of the kernels, such as "hip/attn_fwd.hip". Includes are
    searched next to the including file, then in the top folder; each file is included once. The
    text, and so its digest, does not depend on the location of the folder. Raises
    ``FileNotFoundError`` naming the include that is missing.
    """
    root = directory().resolve()
    defines = "".join(f"#define {name} {value}\n" for name, value in sorted(constants.items()))
    return defines + _expand(root / kernel, root, set(), _PLAIN if generated is None else generated)


def _expand(file: Path, root: Path, taken: set[Path], generated: Mapping[str, str]) -> str:
    taken.add(file)
    name = file.relative_to(root).as_posix()

    def replace(match: re.Match[str]) -> str:
        made = generated.get(match[1].rsplit("/", 1)[-1])
        if made is not None:
            return made
        for folder in (file.parent, root):
            wanted = (folder / match[1]).resolve()
            if wanted.is_file():
                return "" if wanted in taken else _expand(wanted, root, taken, generated)
        raise FileNotFoundError(f'{name} includes "{match[1]}", which is not there')

    text = _ONCE.sub("", file.read_text())
    return f'#line 1 "{name}"\n' + _INCLUDE.sub(replace, text)


def keep_failed(source: str, suffix: str) -> str:
    """Write a source that did not compile to a file to which the error can refer; return its
    path."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="pyfa-failed-", suffix=suffix, delete=False, encoding="utf-8"
    ) as kept:
        kept.write(source)
        return kept.name
