"""Another compiler's kernels: the Triton backend, compiled for gfx942 and run in the emulator.

The backend's own host code runs on CPU tensors; only the launch is replaced, by one that compiles
the same specialization for gfx942 and hands its code object to the emulator. Every storage that is
alive may be touched, and nothing else.
"""

import gc
import os
import struct
from dataclasses import replace

import pytest
import torch
import turns

triton = pytest.importorskip("triton", reason="triton is not installed")

from pyfa import dispatch  # noqa: E402
from pyfa.backends.base import Rounding, missing  # noqa: E402
from pyfa.backends.triton import (  # noqa: E402
    kernel,
    plans,
    quantize,
    runtime,
    runtime_backward,
    specs,
)
from pyfa.backends.triton.backend import TritonBackend  # noqa: E402
from pyfa.conformance import report, runner  # noqa: E402
from pyfa.conformance.cases import Case  # noqa: E402
from pyfa.device import DEVICES  # noqa: E402
from pyfa.emulator import Machine, load  # noqa: E402
from pyfa.quantize import _by_pytorch as by_pytorch  # noqa: E402

_FORMATS = {"i32": "<i", "u32": "<I", "i64": "<q", "fp32": "<f"}

# Forward and backward, plain and with score terms, packed, paged, grouped heads, a split decode.
CASES = (
    Case(lengths_q=(65, 65), lengths_k=(97, 97), heads_q=4, backward=True),
    Case(dtype="float16", lengths_q=(70,), lengths_k=(70,), causal=True, backward=True),
    Case(dtype="float16", lengths_q=(33,), lengths_k=(129,), window=(9, 3), head_dim=128,
         head_dim_v=128),
    Case(lengths_q=(33,), lengths_k=(40,), softcap=8.0, sinks=True, alibi="heads", backward=True),
    Case(lengths_q=(33,), lengths_k=(40,), dropout_p=0.3, bias="full", backward=True),
    Case(kind="varlen", lengths_q=(33, 0, 17), lengths_k=(40, 9, 0), slack=2, backward=True),
    Case(kind="kvcache", lengths_q=(1, 1), lengths_k=(130, 200), heads_q=8, page_size=16),
    # On the float8 matrix units, and a float8 cache under 16-bit queries.
    Case(dtype="float8_e4m3fnuz", lengths_q=(65,), lengths_k=(97,), heads_q=4, scales="head"),
    Case(dtype="float8_e4m3fnuz", lengths_q=(40,), lengths_k=(140,), causal=True, head_dim=128,
         head_dim_v=128, scales=64, out_dtype="float16"),
    Case(kind="varlen", dtype="float8_e4m3fnuz", lengths_q=(33, 0, 17), lengths_k=(40, 9, 0),
         slack=2, scales=16),
    Case(kind="kvcache", lengths_q=(1, 1), lengths_k=(130, 200), heads_q=8, page_size=16,
         cache_dtype="float8_e4m3fnuz", scales=16),
    Case(kind="kvcache", dtype="float16", lengths_q=(2, 2), lengths_k=(130, 200),
         cache_dtype="float8_e4m3fnuz", scales=32),
)  # fmt: skip


# What is in them is in others, too, but for the kind of a float8 call.
NIGHT = tuple(case for case in CASES if case.dtype == "float16" and case.head_dim == 64) + tuple(
    case for case in CASES if case.kind == "varlen" and case.scales
)


class EmulatedKernel(kernel.Kernel):
    """``kernel.Kernel`` of the same specialization, compiled for gfx942, on the emulator."""

    launches = 0

    def __init__(self, spec, index):
        self.spec, self._code = spec, None
        compiled = specs.compile_for(spec, specs.target_of("gfx942"))
        self.lds_bytes = compiled.metadata.shared
        self.threads = 64 * compiled.metadata.num_warps
        program = load(compiled.asm["hsaco"])
        self.loaded = program.kernel(compiled.metadata.name)

    def _start(self, programs, args):
        EmulatedKernel.launches += 1
        # What one variant compiles in still has a place among the arguments, but for the parameters
        # in upper case, which every variant compiles in.
        signature, constants = self.spec.signature, self.spec.constants
        places = [name for name in signature if not (name.isupper() and name in constants)]
        given = zip(places, args, strict=True)
        passed = [(signature[n], value) for n, value in given if signature[n] != "constexpr"]
        explicit = [a for a in self.loaded.kernel.arguments if not a.kind.startswith("hidden_")]
        data = bytearray(self.loaded.kernel.kernarg_bytes)
        for (kind, value), place in zip(passed, explicit, strict=False):
            packed = struct.pack("<Q" if kind.startswith("*") else _FORMATS[kind], value or 0)
            assert len(packed) == place.size
            data[place.offset : place.offset + place.size] = packed
        machine = Machine(threads=os.cpu_count() or 1)
        for begin, nbytes in sorted(_live_storages().items()):
            machine.map(begin, nbytes, "a tensor")
        machine.launch(
            self.loaded,
            grid=(programs,),
            block=(self.threads,),
            kernarg=bytes(data),
            lds_bytes=self.lds_bytes - self.loaded.kernel.lds_bytes,
        )


def _live_storages():
    storages = {}
    for thing in gc.get_objects():
        # Not a subclass: what a compiler leaves behind are tensors without memory.
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage.nbytes()
    return storages


class EmulatedTriton(TritonBackend):
    """The Triton backend on a CPU that it takes for an MI300X."""

    def why_unavailable(self):
        return None

    def why_not(self, problem):
        return missing(self, problem)

    def plan(self, problem):
        return plans.plan(replace(problem, device=DEVICES["MI300X"]), self.NAME)


@pytest.fixture
def backend(monkeypatch, nothing_bound):
    monkeypatch.setattr(kernel, "Kernel", EmulatedKernel)
    for module in (runtime, runtime_backward):
        if hasattr(module, "Kernel"):
            monkeypatch.setattr(module, "Kernel", EmulatedKernel)
    emulated = EmulatedTriton()
    monkeypatch.setitem(dispatch.BACKENDS, "triton", emulated)
    monkeypatch.setattr(dispatch, "_prepared", {})
    nothing_bound()
    return emulated


@pytest.mark.parametrize("case", turns.cases(CASES, NIGHT), ids=lambda case: case.name)
def test_conforms(case, backend):
    before = EmulatedKernel.launches
    result = runner.run_case(backend, case, torch.device("cpu"))
    assert result.status == report.PASSED, result.messages
    assert EmulatedKernel.launches > before


@pytest.mark.parametrize("turned", [False, True], ids=["plain", "rotated"])
def test_quantizing_rounds_as_pytorch_does(turned):
    torch.manual_seed(0)
    rows, dim, block, dtype = 70, 64, 32, torch.float8_e4m3fnuz
    xs = [(torch.randn(2, rows, 4, dim) * torch.rand(2, rows, 1, 1) ** 8).bfloat16() for _ in "qkv"]
    signs = torch.randint(0, 2, (dim,)) * 2.0 - 1.0
    layout = quantize.Layout(
        xs[0].shape, xs[0].stride(), xs[0].dtype, 3, 2 * turned, True, 2, block, False, dtype
    )
    emulated = EmulatedKernel(quantize.spec(layout, "gfx942"), None)
    ys, scales = [torch.zeros(x.shape, dtype=dtype) for x in xs], torch.zeros(3, 2, 2, 3)
    blocks, parts, programs = 3, 2 * 2 * 3, 5  # some go through seven parts, some through eight
    given = (*xs, *ys, scales, scales, signs)
    slots = [kernel.Slot(str(number)) for number in range(len(given))]
    launch = emulated.bind(
        programs,
        (*slots, *xs[0].stride()[:3], rows, 2, dim, blocks, parts, 3, 2 * turned, 1, programs),
        {slot.name: number for number, slot in enumerate(slots)},
    )
    launch([x.data_ptr() for x in given], None)
    wanted = by_pytorch(xs, Rounding(2, block, False, signs if turned else None, dtype))
    for y, scale, (y_wanted, scale_wanted) in zip(ys, scales, wanted, strict=True):
        torch.testing.assert_close(scale, scale_wanted, rtol=1e-6, atol=0.0)
        share = float((y.float() != y_wanted.float()).float().mean())
        assert share <= (2e-3 if turned else 0.0)
