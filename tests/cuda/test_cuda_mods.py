"""score_mod and mask_mod in CUDA: which kernels take them, and that these compile. Not run here."""

from __future__ import annotations

import re
import struct
from dataclasses import replace

import pytest

from pyfa import abi, dispatch, mods
from pyfa.backends.common import arguments
from pyfa.backends.common.program import Params, Program
from pyfa.backends.cuda import code, plans, runtime_compiler
from pyfa.backends.cuda.target import TARGET
from pyfa.conformance.build import build
from pyfa.conformance.cases import Case
from pyfa.device import DEVICES
from pyfa.plan import Plan
from pyfa.problem import problem_of

CASE = Case(
    lengths_q=(129,), lengths_k=(257,), backward=True, score_mod="relative", mask_mod="natten"
)


def plans_for(device: str) -> tuple[Plan, Plan]:
    """Forward and backward of the case."""
    problem = problem_of(build(CASE).spec, True, False, DEVICES[device], True)
    forward = dispatch.ask("cuda", problem, hypothetical=True).plan
    assert forward is not None
    chain = TARGET.backward_plans("cuda", problem.arch, (64, 64), 1, True, False, problem.mods)
    return forward, chain[1]


@pytest.mark.parametrize("device", ["A100-80GB", "H200"])
def test_ampere_s_kernels_take_them(device: str) -> None:
    digest = build(CASE).spec.mods
    for plan in plans_for(device):
        assert plan.kernel.startswith("cuda/sm80/")
        constants = dict(plan.constants)
        assert (constants["MOD"], constants["MOD_CAPTURED"]) == (digest, 1)
    plain = replace(CASE, score_mod="", mask_mod="", softcap=3.0)
    problem = problem_of(build(plain).spec, True, False, DEVICES[device], True)
    found = dispatch.ask("cuda", problem, hypothetical=True).plan
    assert found is not None
    assert "MOD" not in dict(found.constants)


@pytest.mark.skipif(runtime_compiler.why_unavailable() is not None, reason="no NVRTC")
def test_they_compile_without_spills() -> None:
    for plan in plans_for("H200"):
        source = code.source_of(plan)
        assert re.search("DEVICE bool mod_mask", source)
        arch = plans.compiled_for("sm_90a", plan)
        _, report = runtime_compiler.compile_cuda(source, arch=arch)
        assert runtime_compiler.spills(report) == (0, 0)


def test_captured_tensors_follow_the_parameters() -> None:
    """Their addresses are patched into each launch; sizes and strides stay."""
    call = build(CASE).spec
    (table,) = call.captured
    program = Program(("q", "k", "captured0"), call.q)
    values = abi.forward_values(call, (0,) * 4, (0,) * 3)
    params = Params(values, {name: name for name in program.inputs})
    program.add(plans_for("H200")[0], 1, 128, params)
    layout = arguments.layout_of(program, lambda _: ())
    data = bytearray(layout.data)
    ((start, packed, pick),) = layout.packed
    addresses = (0x1111, 0x2222, 0x3333)
    packed.pack_into(data, start, *pick(addresses))
    for at, number in layout.words:
        struct.pack_into("<Q", data, at * 8, addresses[number])
    assert len(data) == abi.SIZE + abi.captured_bytes(mods.MOST_CAPTURED)
    found = abi.unpack(bytes(data))
    assert (found["q"], found["k"]) == (0x1111, 0x2222)
    # Nothing between the addresses is written over.
    assert found["seqlen_k"] == 257
    assert found["scale"] == pytest.approx(call.scale)
    filler = (1,) * (4 - table.dim())
    wanted = (0x3333, *table.shape, *filler, *table.stride(), *filler)
    assert struct.unpack_from("<Q8i", data, abi.SIZE) == wanted
