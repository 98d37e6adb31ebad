"""Head dims above 256 run on the decode kernel, prefill too: a row of lines after the other."""

import pytest
from planted import faults_found

from pyfa import codeobject
from pyfa.backends.hip import code, decode, target
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native.decode import _plan
from pyfa.conformance import cases

WIDE = [pair for pair in target._decode_tiles("gfx942", False) if max(pair) > 256]
# Several workgroups a sequence, both pairs, and heads that fill a part of one.
CASES = (
    cases.dense(37, 70, batch=1, head_dim=512, heads_q=4, causal=True),
    cases.dense(5, 40, batch=1, head_dim=576, head_dim_v=512, window=(20, 3)),
    cases.packed(((9, 17), (40, 33)), "varlen", head_dim=320, dtype="float16", heads_q=4),
    cases.packed(((1, 1), (70, 33)), "kvcache", head_dim=512, page_size=16, num_splits=2),
)
FAULTS = {
    "elements 256 and on as the first": ("return e / 8 * 128 + row * 8",
                                         "return e / 8 % 2 * 128 + row * 8"),
    "queries from 256 on as the first": ("multiply_add(head, p.q_head, eight * 8)",
                                         "multiply_add(head, p.q_head, eight % 32 * 8)"),
    "keys end with 256 elements": ("c < kKeyPieces; ++c) load_key<16>(group.k + c * 4, key, c * 4",
                                   "c < kKeyPieces; ++c) load_key<16>(group.k + c * 4, key, "
                                   "c % 8 * 4"),
    "half of the products with values": ("for (int e = 0; e < kElements; ++e) {\n"
                                         "    Pair v = value_operand(group, e);",
                                         "for (int e = 0; e < kElements / 2; ++e) {\n"
                                         "    Pair v = value_operand(group, e);"),
    "blocks of rows on one another": ("block = quotient(id, shares - whole);", "block = 0;"),
    "rows of the first workgroup for all": ("b.first_line = work.block * TILES * 16;",
                                            "b.first_line = 0;"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sound(case, kernels_run):
    assert not case.flaws()
    assert not faults_found([case])
    assert "attn_decode" in kernels_run


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault, plant):
    plant(decode.KERNEL, *FAULTS[fault])
    assert faults_found(CASES)


@pytest.mark.parametrize("pair", WIDE)
def test_resources(pair):
    for tiles in target._decode_tiles("gfx942", False)[pair]:
        plan = _plan(TARGET, "hip", pair, 1, tiles, False, False)
        kernel = codeobject.parse(code.load(plan, "gfx942").data).kernel("attn_decode")
        assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
        assert kernel.vgprs <= 512
        assert kernel.lds_bytes <= 65536
