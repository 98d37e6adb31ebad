"""The HIP forward kernel, run in the emulator: right as it is, and caught when it is broken."""

import pytest
import torch

from pyfa import codeobject
from pyfa.backends.hip import code, plans
from pyfa.conformance import build, cases, examine
from pyfa.emulator import EmulatorError, native

# Between them: rows and keys past the edges of tiles, more rows than keys, grouped heads, values
# whose rounding shows, maxima that move.
CASES = (
    cases.Case(dtype="bfloat16", lengths_q=(130,), lengths_k=(200,), heads_q=4, heads_k=2),
    cases.Case(dtype="float16", lengths_q=(65,), lengths_k=(33,), causal=True),
    cases.Case(dtype="bfloat16", lengths_q=(33,), lengths_k=(257,), recipe="offset"),
    cases.Case(dtype="float16", lengths_q=(129,), lengths_k=(129,), causal=True, recipe="growing"),
)

# Each: what it is, the exact snippet, what it becomes.
FAULTS = {
    "mask off by one": ("mma_row(r) > last)", "mma_row(r) > last + 1)"),
    "accumulator not rescaled": ("o[t] *= rescale;", ";"),
    "sum not rescaled": ("total = total * rescale + sum;", "total = total + sum;"),
    "maximum of half a row": (
        "raised = __builtin_fmaxf(raised, other_half(raised));",
        "",
    ),
    "sum of half a row": ("total += other_half(total);", ""),
    "barrier after the stores dropped": (
        "    barrier();\n    Acc s[kKeyTiles];",
        "    Acc s[kKeyTiles];",
    ),
    "barrier before the stores dropped": ("barrier();  // the tile before", "// the tile before"),
    "load beyond the sequence": ("if (row < end)\n", "if (true)\n"),
    "store off by one element": ("b.head * p.out_head +", "b.head * p.out_head + 1 +"),
    "rows beyond the sequence stored": ("if (row >= b.rows) return;", ""),
    "wrong key head": ("b.head / (p.heads_q / p.heads_k)", "b.head % p.heads_k"),
    "part of V never written": (
        "void store_values(Lds &lds, const Quad (&part)[kLoads]) {\n  for (int i = 0; i < kLoads;",
        "void store_values(Lds &lds, const Quad (&part)[kLoads]) {\n  for (int i = 1; i < kLoads;",
    ),
    "V transposed at the wrong stride": ("to[j * kStrideV] =", "to[j * (kStrideV - 1)] ="),
    "P truncated": ("return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;", "return bits >> 16;"),
    "LSE in base 2": ("(maximum + log2(total)) * kLn2", "(maximum + log2(total))"),
    "scale forgotten": ("s[t] *= scale;", "s[t] *= kLog2E;"),
    "tiles beyond the diagonal dropped": ("b.first_row + kBlockQ + b.shift", "b.first_row + 1"),
}


@pytest.fixture
def kernel_text(monkeypatch, tmp_path):
    """Replaces the source that plans are compiled from; code objects go to a cache of their own."""
    native.load()
    monkeypatch.setenv("PYFA_CACHE_DIR", str(tmp_path))
    original = code.source_of

    def replace(snippet, other):
        def changed(plan):
            text = original(plan)
            assert text.count(snippet) == 1, f"the kernel has {text.count(snippet)} × {snippet!r}"
            return text.replace(snippet, other)

        monkeypatch.setattr(code, "source_of", changed)
        code.load.cache_clear()

    yield replace
    code.load.cache_clear()


def faults_found(wanted):
    """What the emulator or the rule finds wrong, case by case."""
    found = []
    for case in wanted:
        try:
            checks = examine.examine(build.build(case), "emulator", torch.device("cpu")).checks
        except EmulatorError as error:
            found.append(str(error))
        else:
            found += [check.message for check in checks if not check.passed]
    return found


def test_sound():
    assert not faults_found(CASES)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault, kernel_text):
    kernel_text(*FAULTS[fault])
    assert faults_found(CASES)


@pytest.mark.parametrize("plan", plans.all_plans("hip"), ids=str)
def test_resources(plan):
    """No spill, no scratch, two wavefronts on a SIMD, LDS within a compute unit, code object v5."""
    data = code.load(plan, "gfx942").data
    parsed = codeobject.parse(data)
    kernel = parsed.kernel("attn_fwd")
    assert parsed.version == 5
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert kernel.vgprs + kernel.agprs <= 256
    assert kernel.lds_bytes <= 65536
    assert not kernel.dynamic_stack


def test_two_builds_are_equal():
    plan = plans.all_plans("hip")[0]
    assert code.build(plan, "gfx942") == code.build(plan, "gfx942")


def test_no_slow_instructions():
    """exp2 and log2 are one instruction each: no ldexp, no denormal scaling, no atomics' loops."""
    from pyfa import emulator

    for plan in plans.all_plans("hip"):
        names = set(emulator.load(code.load(plan, "gfx942").data).code.names)
        assert "v_exp_f32" in names
        assert not {name for name in names if "ldexp" in name or "cmpswap" in name}
        assert not {name for name in names if name.startswith("scratch_")}
