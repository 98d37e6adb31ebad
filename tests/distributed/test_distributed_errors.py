"""Mistakes, ranks that differ, ranks that die or hang: who is told what, and when."""

import re

import pytest
import scenarios
import torch
import workers

from pyfa.distributed import RankError, ring_attention, shard, ulysses_attention, unshard

pytestmark = pytest.mark.xdist_group("distributed")


def test_without_a_process_group():
    q = torch.randn(1, 8, 2, 4)
    for function in (ring_attention, ulysses_attention):
        with pytest.raises(ValueError, match="group: expected a process group"):
            function(q, q, q)
    with pytest.raises(ValueError, match="group: expected"):
        shard(q)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"sharding": "striped"}, ValueError, "sharding: expected 'zigzag' or 'contiguous'"),
        ({"mesh": [0, 1]}, TypeError, "mesh: expected a DeviceMesh; got list"),
        ({"group": 3}, TypeError, "group: expected a ProcessGroup; got int"),
        ({"softmax_scale": 1.0}, TypeError, "did you mean 'scale'"),
        ({"bias": None}, TypeError, "unexpected keyword argument 'bias'"),
    ],
)
def test_mistakes_that_need_no_group(options, kind, words):
    q = torch.randn(1, 8, 2, 4)
    with pytest.raises(kind, match=words):
        ring_attention(q, q, q, **options)


def test_a_name_that_only_the_other_function_has():
    q = torch.randn(1, 8, 2, 4)
    with pytest.raises(TypeError) as raised:
        ulysses_attention(q, q, q, sharding="zigzag")
    said = "ulysses_attention() got an unexpected keyword argument 'sharding'"
    assert str(raised.value) == said


def test_unshard_has_no_gradient():
    with pytest.raises(ValueError, match="x: expected no requires_grad"):
        unshard(torch.randn(1, 8, requires_grad=True))


# What rank 2 of 4 has otherwise, what all have, and what each of them is told.
DIFFERENCES = {
    "heads": ({"heads": 12}, {}, r"q: .* got \(2, rows, 6, \d+\) torch.float32 on rank 0 and"),
    "dtype": ({"dtype": torch.bfloat16}, {}, r"q: .* torch.float32 on rank 0 .*bfloat16 on rank 2"),
    "rows": ({"rows": 24}, {}, r"seqlen_q: .* got \(64,\) on rank 0 and \(96,\) on rank 2"),
    "causal": ({"causal": True}, {}, r"window: .* on rank 0 and \(-1, 0\) on rank 2"),
    "scale": ({"scale": 2.0}, {"scale": 1.0}, r"scale: .* 1.0 on rank 0 and 2.0 on rank 2"),
    "dropout": ({"dropout_p": 0.5, "seed": 1}, {}, r"dropout_p: .* 0.0 on rank 0 and 0.5 on rank"),
    "seed": ({"seed": 1}, {"dropout_p": 0.5}, r"seed: .* False on rank 0 and True on rank 2"),
    "sinks": ({"sinks": torch.zeros(6)}, {}, r"sinks: .* False on rank 0 and True on rank 2"),
    "gradient": ({"requires_grad": True}, {}, r"requires_grad: .* on rank 0 and True on rank 2"),
    "sharding": ({"sharding": "contiguous"}, {}, r"sharding: .* on rank 2"),
    "function": (
        {"kind": "ulysses"},
        {"heads": 4},
        r"the function: .* ulysses_attention on rank 2",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_differ_are_found_before_anything_is_sent(pool, name):
    changed, options, words = DIFFERENCES[name]
    dim = 9 + list(DIFFERENCES).index(name)
    for kind, message, sent in pool.run(4, scenarios.differing, 4, 2, changed, options, dim):
        assert kind == "ValueError"
        assert re.search(words, message), message
        assert sent == 0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rows": 13, "seqlen_q": 64, "seqlen_k": 64}, "q: expected 24 rows here, as shard()"),
        ({"softcap": -1.0}, "softcap: expected 0 for none"),
        ({"softcap": "much"}, "softcap: expected a number"),
    ],
)
def test_the_first_mistake_of_one_rank_is_told_to_all(changed, words):
    pool = workers.Pool(3)
    try:
        found = pool.run(3, scenarios.differing, 3, 1, changed, {}, 8)
    finally:
        pool.close()
    for rank, (kind, message, sent) in enumerate(found):
        assert kind in (("ValueError", "TypeError") if rank == 1 else ("ValueError",))
        assert message.startswith(words if rank == 1 else f"rank 1: {words}")
        assert sent == 0


def test_a_later_mistake_of_a_rank_is_its_own_at_once(pool):
    pool.run(3, scenarios.attend, 3, {})
    pool.start(scenarios.differing, [1], 3, 1, {"softcap": -1.0}, {}, 8)
    ((kind, message, _),) = pool.results([1], timeout_s=10)
    assert kind == "ValueError"
    assert message.startswith("softcap")


def test_what_no_block_can_say_is_said_by_all(pool):
    for kind, message, sent in pool.run(3, scenarios.refused, 3):
        assert kind == "ValueError"
        assert message.startswith("dropout_p: with ALiBi or a mask")
        assert sent == 0


def test_keys_in_float8(pool):
    for kind, message, sent in pool.run(3, scenarios.of_float8, 3):
        assert (kind, sent) == ("ValueError", 0)
        assert message.startswith("k: expected float16, bfloat16 or float32")


def test_arguments_are_compared_once(pool):
    # Along each dimension of a mesh.
    assert pool.run(4, scenarios.times_asked, 4) == [[2, 4]] * 4


def test_a_rank_outside_the_group(pool):
    said = "expected one that this process belongs to"
    assert pool.run(4, scenarios.outside, 3)[3] == f"group: {said} and mesh: {said}"


KINDS = {"ring": "keys and values", "ulysses": "all-to-all into heads"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_died(kind):
    pool = workers.Pool(3, timeout_s=30)
    try:
        pool.run(3, scenarios.attend, 3, {}, True, kind)
        pool.processes[2].kill()
        pool.processes[2].join()
        pool.start(scenarios.attend, [0, 1], 3, {}, True, kind)
        with pytest.raises(workers.Failed) as failed:
            pool.results([0, 1], timeout_s=40)
    finally:
        pool.close()
    for rank in (0, 1):
        assert failed.value.kind[rank] == RankError.__name__
        assert f"{kind}_attention on rank {rank}: " in failed.value.message[rank]
        assert KINDS[kind] in failed.value.message[rank]
        # What is sent to all at once may stop for any of them.
        assert re.search(r"rank 2\b|ranks \[0, 1, 2\]", failed.value.message[rank])


@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_that_hangs(backward):
    """It does not call, or does not call backward: the others stop after the group's timeout."""
    pool = workers.Pool(3, timeout_s=4)
    try:
        pool.run(3, scenarios.attend, 3, {})
        if backward:
            pool.start(scenarios.attend, [2], 3, {}, False)
        else:
            pool.start(scenarios.hang, [2])
        pool.start(scenarios.attend, [0, 1], 3, {})
        with pytest.raises(workers.Failed) as failed:
            pool.results([0, 1], timeout_s=30)
    finally:
        pool.close()
    for rank in (0, 1):
        assert failed.value.kind[rank] == RankError.__name__
        assert re.search(r"step \d of 2, .*rank 2", failed.value.message[rank])
