"""Context parallel attention over NCCL: one process with one GPU, and two to four with one each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "distributed"))

import gpu_scenarios
import whole
import workers

from pyfa.conformance import Case

pytestmark = pytest.mark.xdist_group("distributed")

SIZES = (1, 2, 4)
# Rows for which every kernel has whole tiles and others, and chunks of different lengths.
CASES = {
    "causal": {"causal": True, "lengths": (1024,)},
    "all": {"lengths": (500, 500), "dtype": "float16"},
    "uneven": {"causal": True, "lengths": (500, 500)},
    "window": {"causal": True, "window": (200, -1)},
    "cross": {"causal": True, "lengths_q": (340, 340), "lengths_k": (600, 600)},
    "sinks, dlse": {"sinks": True, "dlse": "both", "causal": True},
    "alibi, softcap": {"alibi": "heads", "softcap": 5.0, "causal": True},
    "dropout": {"dropout_p": 0.3, "causal": True},
    "dropout bits": {
        "dropout_p": 0.3, "recipe": "identity", "lengths_q": (256, 256), "lengths_k": (256, 256),
        "head_dim": 128, "head_dim_v": 256, "backward": False,
    },
    "heads of 256": {"head_dim": 256, "head_dim_v": 256, "causal": True},
    "deterministic": {"deterministic": True, "causal": True},
    "packed": {"kind": "varlen", "lengths": (500, 33, 0, 290), "causal": True},
    "packed dropout": {"kind": "varlen", "lengths": (400, 90), "dropout_p": 0.2, "causal": True},
}  # fmt: skip


def case(name: str) -> Case:
    return whole.case_of(
        CASES[name],
        lengths=(512, 512),
        dtype="bfloat16",
        heads_q=8,
        heads_k=4,
        head_dim=128,
        head_dim_v=128,
    )


@pytest.fixture(scope="module", params=SIZES)
def pool(request: pytest.FixtureRequest) -> Iterator[workers.Pool]:
    found = torch.cuda.device_count()
    if found < request.param:
        pytest.skip(f"needs {request.param} GPUs, PyTorch finds {found}")
    made = workers.Pool(request.param, timeout_s=120, device="cuda")
    yield made
    made.close()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sharding", ["zigzag", "contiguous"])
def test_a_ring(pool: workers.Pool, backend: str, name: str, sharding: str) -> None:
    size = len(pool.processes)
    way = ("ring", size, sharding)
    assert pool.run(size, whole.examined, case(name), *way, backend=backend)[0] == []


@pytest.mark.parametrize("name", ["causal", "sinks, dlse", "dropout", "packed"])
def test_heads(pool: workers.Pool, backend: str, name: str) -> None:
    size = len(pool.processes)
    ways = [("ulysses", size)] + ([("mesh", 2, size // 2)] if size > 1 else [])
    for way in ways:
        assert pool.run(size, whole.examined, case(name), *way, backend=backend)[0] == []


@pytest.mark.parametrize("name", ["causal", "sinks, dlse", "dropout", "packed"])
def test_some_heads_at_a_time(pool: workers.Pool, backend: str, name: str) -> None:
    size = len(pool.processes)
    way = ("ring", size, "zigzag")
    assert pool.run(size, whole.examined, case(name), *way, backend=backend, least=1)[0] == []


def test_every_run_gives_the_same_bits(pool: workers.Pool, backend: str) -> None:
    size = len(pool.processes)
    assert pool.run(size, gpu_scenarios.same_bits, size, backend, 20) == [True] * size


def test_memory(pool: workers.Pool, backend: str) -> None:
    """At most 1.5 times inputs, outputs, gradients and two blocks of keys and values."""
    size = len(pool.processes)
    for ratio in pool.run(size, gpu_scenarios.memory, size, backend):
        assert ratio <= 1.5
