"""Code objects: what their metadata says, and that damage is a ``CodeObjectError``."""

from __future__ import annotations

import random

import pytest
from assembly import assemble
from test_emulator_kernels import SOURCE

from pyfa import codeobject
from pyfa.backends.hip import compiler
from pyfa.emulator import load
from pyfa.errors import CodeObjectError, CompileError


@pytest.fixture(scope="module")
def data() -> bytes:
    return compiler.compile_hip(SOURCE.read_text(), arch="gfx942", options=("-DUNUSED=1",))


def test_metadata(data: bytes) -> None:
    parsed = codeobject.parse(data)
    kernel = parsed.kernel("transpose")
    assert (parsed.arch, parsed.abi_version, parsed.version) == ("gfx942", 3, 5)
    assert kernel.lds_bytes == 4 * 64 * 65
    assert kernel.wavefront_size == 64
    assert [a.size for a in kernel.arguments if not a.kind.startswith("hidden")] == [8, 8, 4, 4]
    assert kernel.scratch_bytes == 0
    assert parsed.kernel("scratch").scratch_bytes >= 128
    assert parsed.kernel("gemm").vgprs + parsed.kernel("gemm").agprs >= 20
    with pytest.raises(CodeObjectError, match=r"it has: .*attention"):
        parsed.kernel("missing")


def test_options_reach_the_code_generator() -> None:
    source = """extern "C" __attribute__((global)) void f(float *p) { *p = *p * 2.0f + 1.0f; }"""
    best, none = (compiler.compile_hip(source, arch="gfx942", options=(o,)) for o in ("-O3", "-O0"))
    sizes = [codeobject.parse(code).kernel("f").code_bytes for code in (best, none)]
    assert sizes[0] < sizes[1]


def test_error_of_the_compiler_has_its_log_and_the_source() -> None:
    with pytest.raises(CompileError, match="expected expression") as error:
        compiler.compile_hip("int x = ;", arch="gfx942", options=())
    with open(error.value.source_path, encoding="utf-8") as kept:
        assert kept.read() == "int x = ;"


def test_another_arch_is_refused() -> None:
    source = """extern "C" __attribute__((global)) void f(float *p) { *p = 1.0f; }"""
    data = compiler.compile_hip(source, arch="gfx90a", options=())
    assert codeobject.parse(data).arch == "gfx90a"
    with pytest.raises(CodeObjectError, match="gfx90a"):
        load(data)


def test_damage_is_one_kind_of_error() -> None:
    data, rng = assemble("s_nop 0"), random.Random(1)
    for number in range(400):
        damaged = bytearray(data)
        if number % 4 == 0:
            damaged = damaged[: rng.randrange(len(damaged))]
        for _ in range(rng.choice((1, 4, 30))):
            if damaged:
                reach = rng.choice((64, 700, len(damaged)))
                damaged[rng.randrange(min(len(damaged), reach))] = rng.randrange(256)
        try:
            codeobject.parse(bytes(damaged))
        except CodeObjectError:
            continue
