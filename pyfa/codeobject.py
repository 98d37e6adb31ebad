"""AMDGPU code objects (``.hsaco``): reads the ELF, its notes and its kernel descriptors.

The format is that of LLVM's "User Guide for AMDGPU Backend": code object metadata (note 32,
msgpack) and the 64-byte kernel descriptor ``<name>.kd``. Sizes are bytes, register counts are per
lane.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from pyfa.errors import CodeObjectError

EM_AMDGPU = 224
METADATA_NOTE = 32
# e_flags bits 7:0 (LLVM: EF_AMDGPU_MACH_*).
ARCH_OF_MACH = {
    0x30: "gfx908", 0x3F: "gfx90a", 0x40: "gfx940", 0x4B: "gfx941", 0x4C: "gfx942", 0x4F: "gfx950",
    0x41: "gfx1100", 0x46: "gfx1101", 0x47: "gfx1102", 0x48: "gfx1200", 0x4E: "gfx1201",
}  # fmt: skip


@dataclass(frozen=True)
class KernelArgument:
    """One kernel argument in the kernarg segment: bytes from ``offset``."""

    name: str
    offset: int
    size: int
    kind: str  # "by_value", "global_buffer", or one of the "hidden_*" that a runtime fills in


@dataclass(frozen=True)
class Kernel:
    """One kernel: its metadata, and the fields of its descriptor that a launch needs."""

    name: str
    vgprs: int  # all vector registers, accumulation ones too
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    lds_bytes: int
    scratch_bytes: int  # per work-item
    kernarg_bytes: int
    max_workgroup_size: int
    wavefront_size: int
    dynamic_stack: bool
    arguments: tuple[KernelArgument, ...]
    entry: int  # address in the image of the first instruction
    code_bytes: int
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    preload_dwords: int
    preload_offset: int  # in dwords

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Kernel:
        """Return the kernel from ``data``, the result of ``dataclasses.asdict``, even if ``data``
        was stored as JSON."""
        arguments = tuple(KernelArgument(**each) for each in data["arguments"])
        return cls(**{**data, "arguments": arguments})


@dataclass(frozen=True)
class Function:
    """One function symbol. Its instructions are the ``code_bytes`` bytes from ``address`` on."""

    name: str
    address: int
    code_bytes: int


@dataclass(frozen=True)
class CodeObject:
    """One parsed code object. ``image`` is its memory as a loader lays it out, from address 0."""

    arch: str
    abi_version: int  # EI_ABIVERSION: 2 is code object v4, 3 is v5, 4 is v6
    kernels: Mapping[str, Kernel]
    functions: tuple[Function, ...]
    image: bytes

    @property
    def version(self) -> int:
        """Return the code object version, as ``-mcode-object-version`` counts."""
        return self.abi_version + 2

    def kernel(self, name: str) -> Kernel:
        """Return the kernel called ``name``; raises ``CodeObjectError`` with the names of all
        kernels if there is none."""
        if name not in self.kernels:
            have = ", ".join(sorted(self.kernels)) or "none"
            raise CodeObjectError(f"no kernel named {name!r} in the code object (it has: {have})")
        return self.kernels[name]


def parse(data: bytes) -> CodeObject:
    """Read a code object. Raises ``CodeObjectError`` if it is damaged or not for AMDGPU."""
    from elftools.common.exceptions import ELFError  # heavy, and needed only here
    from elftools.elf.elffile import ELFFile

    try:
        elf = ELFFile(BytesIO(data))
        if elf["e_machine"] not in (EM_AMDGPU, "EM_AMDGPU"):
            raise CodeObjectError(f"not an AMDGPU code object (machine {elf['e_machine']})")
        return _read(elf)
    except CodeObjectError:
        raise
    except (
        ELFError, struct.error, LookupError, ValueError, TypeError, AttributeError, ArithmeticError,
        MemoryError,
    ) as error:  # fmt: skip  # what elftools raises on bytes that are not what they claim
        raise CodeObjectError(f"damaged code object: {error!r}") from error


def _read(elf: Any) -> CodeObject:
    mach = elf["e_flags"] & 0xFF
    arch = ARCH_OF_MACH.get(mach, f"mach 0x{mach:02x}")
    symbols = {symbol.name: symbol for symbol in _symbols(elf)}
    image = _image(elf)
    kernels = {}
    for entry in _metadata(elf).get("amdhsa.kernels", ()):
        kernel = _kernel(entry, symbols, image)
        kernels[kernel.name] = kernel
    functions = tuple(
        Function(name, symbol["st_value"], _code_bytes(elf, symbol))
        for name, symbol in sorted(symbols.items(), key=lambda item: item[1]["st_value"])
        if symbol["st_info"]["type"] == "STT_FUNC" and _code_bytes(elf, symbol)
    )
    return CodeObject(arch, elf["e_ident"]["EI_ABIVERSION"], kernels, functions, image)


def _code_bytes(elf: Any, symbol: Any) -> int:
    """Return the bytes of a function. Hand-written assembly may leave out its size; then it extends
    to the end of its section."""
    number = symbol["st_shndx"]
    if symbol["st_size"] or not isinstance(number, int):
        return int(symbol["st_size"])
    section = elf.get_section(number)
    return max(0, int(section["sh_addr"] + section["sh_size"] - symbol["st_value"]))


def _symbols(elf: Any) -> list[Any]:
    for name in (".symtab", ".dynsym"):
        table = elf.get_section_by_name(name)
        if table is not None:
            return list(table.iter_symbols())
    raise CodeObjectError("the code object has no symbol table")


def _metadata(elf: Any) -> dict[str, Any]:
    import msgpack  # type: ignore[import-untyped, unused-ignore]

    for segment in elf.iter_segments():
        if segment["p_type"] != "PT_NOTE":
            continue
        for note in segment.iter_notes():
            if note["n_name"] == "AMDGPU" and note["n_type"] in (METADATA_NOTE, str(METADATA_NOTE)):
                content = note["n_descdata"]
                try:
                    unpacked = msgpack.unpackb(content, raw=False, strict_map_key=False)
                except (msgpack.UnpackException, ValueError) as error:
                    raise CodeObjectError(f"damaged metadata: {error!r}") from error
                if isinstance(unpacked, dict):
                    return unpacked
    raise CodeObjectError("the code object has no AMDGPU metadata")


def _image(elf: Any) -> bytes:
    loads = [segment for segment in elf.iter_segments() if segment["p_type"] == "PT_LOAD"]
    if not loads:
        raise CodeObjectError("the code object has nothing to load")
    end = max(segment["p_vaddr"] + segment["p_memsz"] for segment in loads)
    if end > 1 << 30:
        raise CodeObjectError(f"the code object claims {end} bytes of memory")
    image = bytearray(end)
    for segment in loads:
        content = segment.data()
        if len(content) != segment["p_filesz"]:
            raise CodeObjectError("the code object is truncated")
        image[segment["p_vaddr"] : segment["p_vaddr"] + len(content)] = content
    return bytes(image)


def _kernel(entry: Mapping[str, Any], symbols: Mapping[str, Any], image: bytes) -> Kernel:
    name = entry[".name"]
    at = symbols[entry[".symbol"]]["st_value"]
    descriptor = image[at : at + 64]
    if len(descriptor) != 64:
        raise CodeObjectError(f"the descriptor of {name!r} lies outside the image")
    (offset,) = struct.unpack_from("<q", descriptor, 16)
    rsrc3, rsrc1, rsrc2 = struct.unpack_from("<III", descriptor, 44)
    properties, preload = struct.unpack_from("<HH", descriptor, 56)
    return Kernel(
        name=name,
        vgprs=entry[".vgpr_count"],
        agprs=entry.get(".agpr_count", 0),
        sgprs=entry[".sgpr_count"],
        vgpr_spills=entry.get(".vgpr_spill_count", 0),
        sgpr_spills=entry.get(".sgpr_spill_count", 0),
        lds_bytes=entry[".group_segment_fixed_size"],
        scratch_bytes=entry[".private_segment_fixed_size"],
        kernarg_bytes=entry[".kernarg_segment_size"],
        max_workgroup_size=entry[".max_flat_workgroup_size"],
        wavefront_size=entry[".wavefront_size"],
        dynamic_stack=entry.get(".uses_dynamic_stack", False),
        arguments=tuple(
            KernelArgument(
                argument.get(".name", ""),
                argument[".offset"],
                argument[".size"],
                argument[".value_kind"],
            )
            for argument in entry.get(".args", ())
        ),
        entry=at + offset,
        code_bytes=symbols[name]["st_size"],
        rsrc1=rsrc1,
        rsrc2=rsrc2,
        rsrc3=rsrc3,
        properties=properties,
        preload_dwords=preload & 0x7F,
        preload_offset=preload >> 7,
    )
