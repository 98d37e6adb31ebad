"""Cubins (NVIDIA's code objects): reads a kernel's resources from the ELF without a GPU.

NVIDIA documents the format only through its tools' output; the attributes read here are what
``cuobjdump -elf`` names ``EIATTR_REGCOUNT``, ``EIATTR_FRAME_SIZE`` and the sections' own sizes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from .errors import CodeObjectError

EM_CUDA = 190
_REGISTERS, _FRAME = 0x2F, 0x11  # EIATTR_…, each a symbol's index and a number
_HAS_SIZE = 0x04  # EIFMT_SVAL: the 16 bits behind the attribute are its size
# From sm_90 on a kernel's shared memory begins with the system's part, and this symbol is there.
_SYSTEMS, _SYSTEMS_BYTES = ".nv.reservedSmem.offset0", 1024


@dataclass(frozen=True)
class Cubin:
    """One kernel. ``stack_bytes``: local memory of a thread, for spills and indexed arrays.
    ``shared_bytes``: the static part, without the dynamic part of a launch and the part that the
    system reserves."""

    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    code_bytes: int


def parse(data: bytes) -> Cubin:
    """Read a cubin of one kernel. Raises ``CodeObjectError`` if it is damaged or has another
    format."""
    from elftools.common.exceptions import ELFError  # heavy, and needed only here
    from elftools.elf.elffile import ELFFile

    try:
        elf = ELFFile(BytesIO(data))
        if elf["e_machine"] not in (EM_CUDA, "EM_CUDA"):
            raise CodeObjectError(f"not a cubin (machine {elf['e_machine']})")
        sections: dict[str, Any] = {section.name: section for section in elf.iter_sections()}
        names = [name[len(".text.") :] for name in sections if name.startswith(".text.")]
        if len(names) != 1:
            raise CodeObjectError(f"expected one kernel in the cubin, found {names}")
        (name,) = names
        symbols = list(sections[".symtab"].iter_symbols())
        numbers = {
            (attribute, symbols[index].name): number
            for attribute, index, number in _attributes(sections[".nv.info"].data())
        }
        shared = sections.get(f".nv.shared.{name}")
        static = shared["sh_size"] if shared is not None else 0
        if static and any(symbol.name == _SYSTEMS for symbol in symbols):
            static -= _SYSTEMS_BYTES
        return Cubin(
            name,
            numbers[_REGISTERS, name],
            numbers[_FRAME, name],
            static,
            sections[f".text.{name}"]["sh_size"],
        )
    except (ELFError, struct.error, LookupError, ValueError, TypeError, AttributeError) as error:
        raise CodeObjectError(f"damaged cubin: {error!r}") from error


def _attributes(data: bytes) -> list[tuple[int, int, int]]:
    """Return (attribute, symbol, number) of the entries of ``.nv.info`` that have this form."""
    found, at = [], 0
    while at < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _HAS_SIZE:
            if attribute in (_REGISTERS, _FRAME):
                found.append((attribute, *struct.unpack_from("<II", data, at)))
            at += size
    return found
