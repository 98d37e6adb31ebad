"""Decode over a latent cache: values read in the keys' place, each byte asked for once."""

import pytest
import torch
from planted import faults_found
from test_attn_decode import Recording

from pyfa import codeobject
from pyfa.backends.hip import code, decode
from pyfa.backends.hip.launcher import Launcher
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import decode as native_decode
from pyfa.conformance import cases
from pyfa.device import DEVICES
from pyfa.problem import Call, problem_of, tensors_of


def latent(lengths_q, lengths_k, **fields):
    dims = {"head_dim": 576, "head_dim_v": 512, "heads_k": 1, "scale": 192**-0.5}
    return cases.packed((lengths_q, lengths_k), "latent", **dims | fields)


# On one plan: rounds of the main loop and what is left of them, pages, lists, part of the heads.
CASES = (
    latent((1, 1), (40, 300), heads_q=16, num_splits=1, slack=3, recipe="offset"),
    latent((3, 3), (70, 61), heads_q=7, page_size=5, causal=True, sinks=True, num_splits=2),
    latent((1,), (90,), heads_q=16, topk=70),
    latent((1,), (35,), heads_q=4, head_dim=320, head_dim_v=200),
)
FAULTS = {
    "pieces read where they were not written": ("[place_of_piece(byte / 16, key)]",
                                                "[byte / 16]"),
    "keys of V in another order": ("int key = M::part() * 4 + i;", "int key = M::part() + i * 4;"),
    "first 256 bytes for all": ("const unsigned *k = group.k + (c * 4 + j) * 4;",
                                "const unsigned *k = group.k + j * 4;"),
    "one wavefront's keys for all": ("shared.turns[wave_index()]", "shared.turns[0]"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sound(case, kernels_run):
    assert not case.flaws()
    assert not faults_found([case])
    assert kernels_run[0] == "attn_decode"


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault, plant):
    plant(decode.KERNEL, *FAULTS[fault])
    assert faults_found(CASES)


def plan_and_call(keys, heads, dtype=torch.bfloat16):
    q = torch.zeros(1, 1, heads, 576, dtype=torch.bfloat16)
    k = torch.zeros(1, keys, 1, 576, dtype=dtype)
    call = Call(q, k, k[..., :512], max_seqlen_q=1, max_seqlen_k=keys, latent=True)
    problem = problem_of(call, False, False, DEVICES["MI300X"], True)
    return native_decode.plan(TARGET, "hip", problem), call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fnuz])
def test_resources(dtype):
    plan, _ = plan_and_call(64, 16, dtype)
    kernel = codeobject.parse(code.load(plan, "gfx942").data).kernel("attn_decode")
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert kernel.vgprs <= 512
    assert kernel.lds_bytes <= 65536


@pytest.mark.parametrize(("heads", "groups"), [(16, 1), (32, 2)])
def test_each_byte_is_asked_for_once_a_workgroup(heads, groups):
    """Of 16 heads: more are more workgroups, which ask for the same keys."""
    plan, call = plan_and_call(4096, heads)
    call = call._replace(num_splits=1)
    runtime = Recording()
    native_decode.bind(Launcher(runtime), plan, call)(*tensors_of(call))
    name, _, counters = runtime.launches[0]
    assert name == "attn_decode"
    once = groups * 4096 * 576 * 2
    assert once <= counters.load_bytes <= 1.03 * once
    assert counters.lds_conflict_clocks == 0
