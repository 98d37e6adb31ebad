"""The struct that kernels take: Python's bytes and C's members are one layout."""

import ctypes
import struct
import subprocess
import sys

import pytest
import torch

from pyfa import abi, request, sources
from pyfa.backends.common import arguments
from pyfa.backends.common.program import Params, Program
from pyfa.plan import Plan


def test_header_is_generated_from_the_table():
    assert (sources.directory() / "params.h").read_text() == abi.header()


def test_no_holes():
    """ctypes lays the members out as a C compiler does: nothing is padded, inside or at the end."""
    kinds = {
        "void *": ctypes.c_uint64,
        "long long": ctypes.c_int64,
        "unsigned long long": ctypes.c_uint64,
        "int": ctypes.c_int32,
        "unsigned": ctypes.c_uint32,
        "float": ctypes.c_float,
    }

    class Params(ctypes.Structure):
        _fields_ = [(field.name, kinds[field.type]) for field in abi.FIELDS]

    assert ctypes.sizeof(Params) == abi.SIZE
    values = {field.name: index + 1 for index, field in enumerate(abi.FIELDS)}
    params = Params.from_buffer_copy(abi.pack(values))
    assert {name: getattr(params, name) for name in abi.NAMES} == values
    assert abi.unpack(abi.pack(values)) == values


def test_header_compiles(tmp_path):
    """Its static_asserts are the compiler's own word on the layout."""
    source = tmp_path / "check.cpp"
    source.write_text(abi.header())
    target = tmp_path / "check.o"
    command = [sys.executable, "-m", "ziglang", "c++", "-std=c++17", "-c", source, "-o", target]
    subprocess.run(command, check=True)
    source.write_text(abi.header().replace("int batch;", "int batch, another;"))
    broken = subprocess.run(command, capture_output=True, text=True, check=False)
    assert broken.returncode != 0
    assert "as pyfa/abi.py packs it" in broken.stderr


def test_maps_follow_at_their_alignment():
    data = abi.pack({"batch": 3}, [b"\1" * 128, b"\2" * 128])
    assert len(data) % 64 == 0
    assert abi.MAPS_AT % 64 == 0
    assert 0 <= abi.MAPS_AT - abi.SIZE < 64
    assert data[abi.MAPS_AT :][:256] == b"\1" * 128 + b"\2" * 128
    assert abi.unpack(data)["batch"] == 3
    with pytest.raises(ValueError, match="tensor maps"):
        abi.pack({}, [b"\1" * 127])
    with pytest.raises(ValueError, match="tensor maps"):
        abi.pack({}, [b"\1" * 128] * 9)
    with pytest.raises(KeyError):
        abi.pack({"batches": 1})


def test_forward_values():
    q, k = torch.randn(2, 5, 4, 8), torch.randn(3, 16, 2, 8)
    table = torch.tensor([[0, 1], [2, 2]], dtype=torch.int32)
    lengths = torch.tensor([17, 20], dtype=torch.int32)
    bias = torch.randn(1, 4, 1, 32, dtype=torch.float16)
    shared = request.Shared(causal=True, window=(9, None), bias=bias, softcap=3.0)
    call = request.kvcache(q, k, k, shared, cache_seqlens=lengths, page_table=table).call
    values = abi.unpack(abi.pack(abi.forward_values(call, *strides(call))))
    expected = {
        "q": 0,
        "page_table": 0,
        "seqused_k": 0,
        "q_batch": 160,
        "q_row": 32,
        "q_head": 8,
        "k_batch": 256,
        "page_size": 16,
        "seqlen_k": 32,
        "window_left": 9,
        "window_right": 0,
        "bias_type": 3,
        "bias_batch": 0,
        "bias_head": 32,
        "bias_row": 0,
        "bias_key": 1,
        "lse_batch": 20,
        "lse_head": 5,
        "dropout_threshold": 0,
        "softcap": 3.0,
    }
    assert {name: values[name] for name in expected} == expected
    assert values["scale"] == pytest.approx(8**-0.5)
    given = {"q", "k", "v", "bias", "seqused_k", "page_table"}
    assert abi.pointers_of(call) == {name: name for name in given}


def strides(call):
    """Of out and LSE."""
    return torch.empty(call.out_shape()).stride(), torch.empty(call.lse_shape()).stride()


def test_strides_of():
    dense, packed = torch.empty(2, 5, 3, 8), torch.empty(10, 3, 8)
    expected = {"dq_batch": 120, "dq_row": 24, "dq_head": 8}
    assert abi.strides_of("dq", dense.stride()) == expected
    assert abi.strides_of("dq", packed.stride()) == expected | {"dq_batch": 0}
    assert set(expected) <= set(abi.NAMES)


def test_scales_of_float8():
    q, k = (torch.zeros(2, rows, 2, 16).to(torch.float8_e4m3fnuz) for rows in (40, 70))
    of_head = torch.ones(2, 4)[:, ::2]
    shared = request.Shared(descale=(of_head, of_head, torch.ones(())))
    values = abi.descale_values(request.dense(q, k, k, shared).call)
    expected = {"descale_type": 1, "q_descale_batch": 4,
                "k_descale_head": 2, "v_descale_batch": 0, "k_descale_block": 0}  # fmt: skip
    assert {name: values[name] for name in expected} == expected

    blocks = torch.ones(2, 2, 5)
    shared = request.Shared(descale=(torch.ones(2, 2, 2), blocks, blocks))
    call = request.dense(q, k, k, shared).call
    values = abi.forward_values(call, *strides(call))
    expected = {"descale_type": 2, "q_block_log2": 5, "k_block_log2": 4, "k_descale_batch": 10,
                "v_descale_head": 5, "v_descale_block": 1}  # fmt: skip
    assert {name: values[name] for name in expected} == expected

    call = request.dense(q, k, k, request.Shared()).call
    values = abi.forward_values(call, *strides(call))
    assert not [name for name in values if "descale" in name]


class TestFlatten:
    @pytest.fixture
    def kernels(self, tmp_path, monkeypatch):
        (tmp_path / "hip").mkdir()
        (tmp_path / "params.h").write_text("#pragma once\nstruct Params {};\n")
        (tmp_path / "hip" / "mma.h").write_text('#pragma once\n#include "../params.h"\nint mma;\n')
        (tmp_path / "hip" / "a.hip").write_text(
            '#include "../params.h"\n#include "mma.h"\n#include "mma.h"  // twice\nint a;\n'
        )
        monkeypatch.setattr(sources, "directory", lambda: tmp_path)
        return tmp_path

    def test_each_include_once_in_place(self, kernels):
        text = sources.flatten("hip/a.hip", {"TILE": 64, "DIM": 8})
        assert text.startswith("#define DIM 8\n#define TILE 64\n")
        assert text.count("struct Params") == 1
        assert text.count("int mma;") == 1
        assert text.index("struct Params") < text.index("int mma;") < text.index("int a;")
        assert "#include" not in text
        assert str(kernels) not in text

    def test_missing_include_is_named(self, kernels):
        (kernels / "hip" / "a.hip").write_text('#include "gone.h"\n')
        with pytest.raises(FileNotFoundError, match=r'hip/a\.hip includes "gone\.h"'):
            sources.flatten("hip/a.hip", {})


@pytest.mark.parametrize("members", [("out",), ("q", "k", "v", "out", "lse"), ("seed", "k")])
def test_addresses_are_written_where_the_members_are(members):
    """Over the bytes of a struct whose numbers are already there."""
    program = Program(("captured0", *reversed(members)), torch.empty(1))
    params = Params({"batch": 3, "scale": 0.5}, {name: name for name in members})
    program.add(Plan("hip", "any", ()), 1, 64, params)
    layout = arguments.layout_of(program, lambda _: ())
    addresses = [(1 << 60) + 16 * i for i in range(len(program.names))]
    data = bytearray(layout.data)
    for at, number in layout.words:
        struct.pack_into("<Q", data, at * 8, addresses[number])
    found = abi.unpack(bytes(data))
    assert {name: value for name, value in found.items() if value} == {
        "batch": 3,
        "scale": 0.5,
        **{name: addresses[program.names.index(name)] for name in members},
    }
