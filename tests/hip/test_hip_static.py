"""Hot loops as ``pyfa inspect`` sees them: what was built, and the forward kernel's budgets."""

from __future__ import annotations

import pytest
import torch
import turns

from pyfa.backends.common import calls
from pyfa.backends.hip import backward, code, forward, samples
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import decode as native_decode
from pyfa.backends.native import forward as native_forward
from pyfa.backends.native.launch import Launcher
from pyfa.cli.inspect import emulate, inspect
from pyfa.emulator import native
from pyfa.plan import Plan
from pyfa.problem import Call, tensors_of

PLAIN = [
    plan
    for plan in forward.all_plans("hip")
    if samples.is_plain(plan)
    and dict(plan.constants).get("OUT_DTYPE", dict(plan.constants)["DTYPE"])
    == calls.DTYPE_CODES["bfloat16"]
]
# (VALU + exp) / MFMA clocks at most. AITER's forward has 0.94 at 128 with the same rounding,
# and 1.09 in float8, where products take half the clocks.
MOST_VECTOR = {64: 1.15, 96: 0.8, 128: 0.65, 192: 0.5, 256: 0.35}
MOST_VECTOR_OF_FLOAT8 = {64: 2.0, 96: 1.35, 128: 1.0, 192: 0.8, 256: 0.55}


def is_rare(plan: Plan) -> bool:
    """Whether no other test of a pull request compiles it."""
    return int(dict(plan.constants)["HEAD_DIM"]) not in (64, 128)


@pytest.fixture(autouse=True)
def _emulator() -> None:
    if native.why_unavailable() or code.why_unavailable():
        pytest.skip("no compiler for the emulator")


@pytest.mark.parametrize(
    "plan",
    turns.cases(PLAIN, filter(is_rare, PLAIN)),
    ids=lambda plan: samples.of(plan).title,
)
def test_hot_loop(plan: Plan) -> None:
    """Counted, and worked out from the tile: 32 rows of a wavefront against all keys of it."""
    found, constants = inspect(plan, "gfx942"), {name: int(x) for name, x in plan.constants}
    size = 1 if dict(plan.constants)["DTYPE"] == forward.FLOAT8_CODE else 2
    keys, waves = constants["BLOCK_K"], constants["WAVES"]
    dim, dim_v = constants["HEAD_DIM"], constants["HEAD_DIM_V"]
    assert found["mfma_clocks"] == size * 32 * keys * (dim + dim_v) / 512
    assert found["instructions"]["trans"] == 32 * keys / 64
    # A wavefront reads all of K and V from LDS and writes its share of V; K arrives in rows of a
    # power of two elements, without registers.
    assert found["lds_bytes"] == (keys * (dim + dim_v) + keys * dim_v / waves) * size
    row = 1 << (dim - 1).bit_length()
    assert found["lds_direct_bytes"] == keys * row * size / waves
    loaded = found["load_bytes_per_mfma_clock_of_cu"] * found["mfma_clocks"] / 4
    assert loaded == pytest.approx(keys * (dim + dim_v) * size / waves)

    most = MOST_VECTOR_OF_FLOAT8 if size == 1 else MOST_VECTOR
    assert found["vector_over_mfma"] <= most[dim]
    assert found["lds_conflict_clocks"] == 0
    assert found["barriers_per_64_keys"] <= 2
    assert found["lds_bytes_per_mfma_clock_of_cu"] <= 72
    assert found["lds_clocks_of_cu"] < found["mfma_clocks"]


def test_the_launches_of_other_kernels_are_left_out() -> None:
    """Keys in two parts: the forward, then the kernel that merges, which has no products."""
    q = torch.zeros(1, 32, 1, 64, dtype=torch.bfloat16)
    call = Call(q, q, q, max_seqlen_q=32, max_seqlen_k=32, num_splits=2)
    plan = PLAIN[0]

    def run(launch: Launcher, _: int) -> None:
        native_forward.bind(launch, plan, call)(*tensors_of(call))

    sample = samples.Sample("", run, 1, 1, 32, 32, 1)
    assert emulate(plan, sample, 1).instructions["mfma"] > 0


def test_every_kind_of_plan_has_a_sample() -> None:
    """Those of the loops over tiles; a title names its plan."""
    made = [sample for plan in forward.all_plans("hip") if (sample := samples.of(plan))]
    assert len(made) == len(forward.all_plans("hip")) == len({sample.title for sample in made})


@pytest.mark.parametrize(
    ("title", "rows", "keys", "dims", "conflicts"),
    [
        ("64/64 bf16", 16, 16, 128, 0),
        # Of 4 writes of transposed tiles (Q and dO), a wavefront's quarter: no linear swizzle cures
        # them together with the reads, which have none.
        ("64/64 bf16 dK, dV", 32, 32, 256, 4 * 4),
        # 2 writes (K).
        ("64/64 bf16 dQ", 32, 32, 192, 2 * 4),
    ],
)
def test_products_of_the_other_kernels(
    title: str, rows: int, keys: int, dims: int, conflicts: int
) -> None:
    """Decode: over D and Dv. Backward: the same, and then dV and dK, or dQ."""
    plan = next(
        plan
        for plan in native_decode.all_plans(TARGET, "hip", "gfx942") + backward.all_plans("hip")
        if (sample := samples.of(plan)) and (sample.title, sample.rows) == (title, rows)
    )
    found = inspect(plan, "gfx942")
    assert found["mfma_clocks"] == 2 * rows * keys * dims / 512
    assert found["lds_conflict_clocks"] == conflicts


@pytest.mark.parametrize("kind", ["softcap", "dropout", "softcap, paged"])
def test_other_scores_cost_only_vector_work(kind: str) -> None:
    """The same products and barriers; what a score term adds is vector instructions."""

    def figures(wanted: str) -> dict[str, float]:
        title = f"64/64 bf16 {wanted}"
        (plan,) = (p for p in forward.all_plans("hip") if samples.of(p).title == title)
        return inspect(plan, "gfx942")

    plain, other = figures("plain"), figures(kind)
    for name in ("mfma_clocks", "lds_conflict_clocks", "barriers_per_64_keys"):
        assert other[name] == plain[name]
    assert other["vector_clocks"] > plain["vector_clocks"]
