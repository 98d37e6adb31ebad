"""The decoder: against LLVM's disassembler where one is installed, and against the core's table."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_emulator_kernels import SOURCE, triton_program

from pyfa import cache
from pyfa.backends.hip.compiler import compile_hip
from pyfa.emulator import decode, load, native, tables
from pyfa.emulator.counters import Totals
from pyfa.emulator.machine import _Launch, _Region
from pyfa.emulator.text import text_of

# gfx942 is known to LLVM from 17 on.
OBJDUMP = next(
    (path for version in range(22, 16, -1) if (path := shutil.which(f"llvm-objdump-{version}"))),
    None,
)
TABLES = (
    "SOP1",
    "SOP2",
    "SOPC",
    "SOPK",
    "SOPP",
    "SMEM",
    "VOP1",
    "VOP2",
    "VOPC",
    "VOP3",
    "VOP3P",
    "DS",
    "GLOBAL",
    "SCRATCH",
    "MUBUF",
)


def mnemonics() -> set[str]:
    names = {name for table in TABLES for name in getattr(tables, table).values()}
    return names | {n.replace("global_", "flat_") for n in tables.GLOBAL.values() if "lds" not in n}


def test_tables_and_core_name_the_same_operations() -> None:
    assert mnemonics() == set(native.operations())


def test_layouts_agree() -> None:
    library = native.load()
    sizes = [decode.INSTRUCTION.itemsize, *map(ctypes.sizeof, (_Launch, Totals, _Region))]
    assert [library.emulator_size(n) for n in range(4)] == sizes


def test_the_core_that_is_loaded_is_the_one_that_was_verified(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not the file, which another process may have changed in between."""
    native.load()
    build = cache.get_or_build

    def changed(*arguments: Any, **named: Any) -> cache.Entry:
        path = tmp_path / "code.so"
        path.write_bytes(b"planted")
        return dataclasses.replace(build(*arguments, **named), path=path)

    monkeypatch.setattr(cache, "get_or_build", changed)
    assert native.load.__wrapped__().emulator_ops() == native.load().emulator_ops()


def test_every_operation_has_a_test() -> None:
    """Operations by the test that executes them alone; the others only run inside kernels."""
    import test_emulator_cross as test_cross
    import test_emulator_mfma as test_mfma
    import test_emulator_scalar as test_scalar
    import vector_cases

    text = "\n".join(check[0] for check in test_cross.CHECKS.values())
    alone = {re.sub(r"_(e32|e64|dpp|sdwa)$", "", word) for word in re.findall(r"\b[sv]_\w+", text)}
    alone |= set(vector_cases.CASES) | set(test_scalar.RULES) | set(test_scalar.EXEC_RULES)
    alone |= set(test_mfma.NAMES) | set(tables.VOPC.values())
    memory = {
        n for n in mnemonics() if n.startswith(("ds_", "global_", "flat_", "buffer_", "scratch_"))
    }
    memory |= {n for n in tables.SMEM.values() if "load" in n}  # counted by test_emulator_memory
    only_in_kernels = {
        "s_endpgm",
        "s_barrier",
        "s_trap",  # test_faults
        "v_div_scale_f32",
        "v_div_scale_f64",
        "v_div_fmas_f32",
        "v_div_fmas_f64",  # division
    }
    assert mnemonics() - alone - memory == only_in_kernels


def disassembled(data: bytes, folder: Path) -> dict[int, str]:
    """The text of each instruction, without the suffix of its encoding."""
    path = folder / "code.hsaco"
    path.write_bytes(data)
    assert OBJDUMP is not None
    shown = subprocess.run(
        [OBJDUMP, "-d", "--mcpu=gfx942", str(path)], capture_output=True, text=True, check=True
    ).stdout
    found = {}
    for line in shown.splitlines():
        match = re.match(r"\s+(\S.*?)\s*// ([0-9A-F]{12}):((?: [0-9A-F]{8})+)", line)
        if match:
            text = re.sub(r"^(\w+?)_(e32|e64|dpp|sdwa)\b", r"\1", match[1])
            # Lanes that differ in one bit, which LLVM 19 calls by name: the mask of all five bits,
            # and that one from bit 10 on.
            text = re.sub(r"swizzle\(SWAP,(\d+)\)", lambda x: f"{31 | int(x[1]) << 10}", text)
            found[int(match[2], 16)] = text
    return found


@pytest.mark.skipif(OBJDUMP is None, reason="no llvm-objdump of version 17 or later is installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["hip", "softmax", "matmul", "attention", "causal"])
def test_second_decoder_agrees(kind: str, tmp_path: Path) -> None:
    if kind == "hip":
        program = load(data := compile_hip(SOURCE.read_text(), arch="gfx942", options=()))
    else:
        program, _, _, _, data = triton_program(kind)
    other = disassembled(data, tmp_path)
    image = program.object.image
    for pc in map(int, program.code.instructions["pc"]):
        low, high = (int.from_bytes(image[at : at + 4], "little") for at in (pc, pc + 4))
        assert text_of(low, high) == other.pop(pc), hex(pc)
    assert len(program.code.names) > 50


def test_unknown_encodings_do_not_decode() -> None:
    for word in (0x7E00FFFF, 0xF0000000, 0xE8000000, 0xC4000000, 0xBF8F0000 | 0x7F0000):
        one = decode.decode(word, 0)
        assert not one.known or one.name not in native.operations()
