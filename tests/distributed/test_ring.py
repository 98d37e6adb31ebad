"""Ring attention on 1 to 4 processes: what one process gives, under the conformance rule."""

import pytest
import turns
import whole

from pyfa.conformance import Case

pytestmark = pytest.mark.xdist_group("distributed")

# 64 rows are 2 · 4 chunks of 8; of 77 and 101 the last chunks are shorter, or empty.
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "bf16": {"dtype": "bfloat16", "causal": True},
    "fp16": {"dtype": "float16"},
    "uneven": {"lengths": (101, 101)},
    "uneven causal": {"lengths": (77, 77), "causal": True},
    "short": {"lengths": (6, 6), "causal": True},
    "cross": {"lengths_q": (40, 40), "lengths_k": (72, 72)},
    "cross causal": {"lengths_q": (40, 40), "lengths_k": (72, 72), "causal": True},
    "cross causal, rows that see nothing": {
        "lengths_q": (72, 72), "lengths_k": (40, 40), "causal": True,
    },
    "no rows": {"lengths_q": (0, 0)},
    "no keys": {"lengths_k": (0, 0)},
    "window": {"window": (10, 7)},
    "window, uneven": {"lengths": (101, 101), "window": (19, 0)},
    "window of a row": {"window": (0, 0)},
    "sliding": {"causal": True, "window": (20, -1)},
    "looking ahead": {"window": (-1, 3)},
    "softcap": {"softcap": 2.0, "causal": True},
    "alibi": {"alibi": "heads", "causal": True},
    "alibi a sequence, uneven": {"alibi": "batch", "lengths": (77, 77)},
    "alibi, window": {"alibi": "heads", "window": (15, 9)},
    "sinks": {"sinks": True, "causal": True},
    "sinks, rows that see nothing": {
        "sinks": True, "lengths_q": (72, 72), "lengths_k": (40, 40), "causal": True,
    },
    "sinks bf16": {"sinks": True, "dtype": "bfloat16"},
    "gqa": {"heads_q": 6, "heads_k": 2, "causal": True},
    "dv": {"head_dim": 24, "head_dim_v": 40, "causal": True},
    "dlse": {"dlse": "both", "causal": True, "sinks": True},
    "dlse only": {"dlse": "only"},
    "dropout": {"dropout_p": 0.4, "causal": True},
    "dropout bits": {"dropout_p": 0.4, "recipe": "identity", "head_dim_v": 64, "backward": False},
    "dropout, uneven": {"dropout_p": 0.4, "causal": True, "lengths": (101, 101)},
    "dropout, window": {"dropout_p": 0.4, "window": (20, 9), "lengths": (101, 101)},
    "dropout, alibi": {"dropout_p": 0.2, "alibi": "heads", "causal": True, "lengths": (96, 96)},
    "deterministic": {"deterministic": True, "causal": True, "window": (30, -1)},
    "growing": {"recipe": "growing", "causal": True},
    "huge": {"recipe": "huge"},
    "offset": {"recipe": "offset", "dtype": "bfloat16"},
    "strided": {"layout": "strided", "causal": True},
    "heads first": {"layout": "heads_first", "causal": True},
    "scale of 0": {"scale": 0.0, "causal": True},
    "packed": {"kind": "varlen", "lengths": (64, 40, 8)},
    "packed causal": {"kind": "varlen", "lengths": (64, 77, 0, 5), "causal": True},
    "packed bf16": {"kind": "varlen", "lengths": (64, 77, 5), "causal": True, "dtype": "bfloat16"},
    "packed cross": {
        "kind": "varlen", "lengths_q": (30, 50), "lengths_k": (64, 21), "causal": True,
    },
    "packed window": {"kind": "varlen", "lengths": (90, 33, 12), "window": (16, 5)},
    "packed alibi": {"kind": "varlen", "lengths": (64, 33, 12), "alibi": "batch", "causal": True},
    "packed dropout": {"kind": "varlen", "lengths": (64, 33), "dropout_p": 0.3, "causal": True},
    "packed sinks": {"kind": "varlen", "lengths": (64, 0, 33), "sinks": True, "dlse": "both"},
}  # fmt: skip


def case(name: str) -> Case:
    return whole.case_of(
        CASES[name],
        lengths=(64, 64),
        dtype="float32",
        heads_q=4,
        heads_k=4,
        head_dim=16,
        head_dim_v=16,
    )


@pytest.mark.parametrize("name", CASES)
def test_ranks_together_give_what_one_gives(pool, name):
    found = {}
    for size, sharding in ((2, "contiguous"), (4, "zigzag")):
        wrong = pool.run(size, whole.examined, case(name), "ring", size, sharding)[0]
        if wrong:
            found[size, sharding] = wrong
    assert not found


@pytest.mark.parametrize("name", ["causal", "uneven", "sinks", "dropout", "packed causal", "dlse"])
def test_one_rank(pool, name):
    assert pool.run(1, whole.examined, case(name), "ring", 1, "zigzag")[0] == []


AT_A_TIME = ("bf16", "uneven", "gqa", "dv", "alibi a sequence, uneven", "sinks", "dlse", "dropout",
             "deterministic", "packed window", "packed dropout", "packed sinks")  # fmt: skip


@pytest.mark.parametrize("name", AT_A_TIME)
def test_some_heads_at_a_time(pool, name):
    for size in (1, 3):
        assert pool.run(size, whole.examined, case(name), "ring", size, "zigzag", least=1)[0] == []


def test_ranks_with_more_rows_than_others_take_as_many_heads_at_a_time(pool):
    # 21, 40 and 40 rows of 128 elements.
    uneven = case("uneven")
    assert pool.run(3, whole.examined, uneven, "ring", 3, "zigzag", least=1500)[0] == []


# One sequence, whose stride is nothing to PyTorch; and of one head as well.
LONE = {
    "dense": {"heads_q": 4, "heads_k": 2},
    "one head": {"heads_q": 1, "heads_k": 1},
    "packed, one head": {"kind": "varlen", "heads_q": 1, "heads_k": 1, "dropout_p": 0.3},
}


@pytest.mark.parametrize("name", turns.cases(LONE, night=("dense", "one head")))
def test_kernels_stay_inside_their_tensors_where_a_sequence_is_alone(pool, name):
    """On the emulator, which knows where each tensor ends."""
    lone = whole.case_of(
        LONE[name], lengths=(64,), dtype="bfloat16", head_dim=16, head_dim_v=16, causal=True,
        dlse="both",
    )  # fmt: skip
    wrong = pool.run(2, whole.examined, lone, "ring", 2, "zigzag", backend="emulator", least=1)
    assert wrong[0] == []
