"""The scripts that run other projects' test files: what they change of a case, and the CPU that
stands for a GPU. The files themselves are not in this repository."""

import os
import subprocess
import sys
from pathlib import Path

import flash_attn_suite
import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((113, 256), (113, 256)),
        ((4224, 4224), (132, 132)),
        ((1023, 1024), (255, 256)),
        ((799, 3), (199, 3)),
        ((512, 256), (256, 128)),  # 256 and 256 would make a square of it
        ((1024, 1), (256, 1)),
    ],
)
def test_shortened_lengths_keep_their_order(
    given: tuple[int, int], expected: tuple[int, int]
) -> None:
    case = {"seqlen_q": given[0], "seqlen_k": given[1], "d": 512, "dtype": "bfloat16"}
    found = flash_attn_suite.shortened(case, 256)
    assert (found["seqlen_q"], found["seqlen_k"]) == expected
    assert {**found, "seqlen_q": 0, "seqlen_k": 0} == {**case, "seqlen_q": 0, "seqlen_k": 0}


def test_a_shortened_cache_has_whole_pages() -> None:
    case = {"seqlen_q": 64, "seqlen_k": 800, "page_size": 128}
    assert flash_attn_suite.shortened(case, 256) == case | {"seqlen_k": 256}
    case = {"min_seq_len": 1024, "max_seq_len": 2048}
    assert flash_attn_suite.shortened(case, 256) == {"min_seq_len": 256, "max_seq_len": 256}


def test_a_function_among_the_parameters_has_the_same_name_everywhere() -> None:
    def causal() -> None: ...

    found = flash_attn_suite.name_of("test_mods", {"pair": (causal, None), "d": 64})
    assert found == "test_mods[d=64,pair=(causal,None)]"


def test_a_failure_says_what_the_test_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def case(value: float) -> None:
        print("first\n" * 100)
        print(f"dK max diff: {value}")
        assert value < 1e-4

    status, message = flash_attn_suite.run_one(case, {"value": 2e-4}, 60)
    assert status == "failed"
    said, trace = message.split("Traceback", 1)
    assert said.endswith("first\n\ndK max diff: 0.0002\n")
    assert "test_suite_cases.py" in trace
    assert "AssertionError" in trace.splitlines()[-1]
    assert len(said.splitlines()) == flash_attn_suite.SAID
    assert flash_attn_suite.run_one(case, {"value": 0.0}, 60) == ("passed", "")
    assert capsys.readouterr().out == ""


def test_cases_that_fill_a_gpu_share_a_worker() -> None:
    drawn = [
        (test, {"d": d, "dtype": "bfloat16"})
        for test in ("test_output", "test_flash_attn_race_condition")
        for d in (64, 96, 128, 256)
    ]
    found = flash_attn_suite.shares(drawn, 3)
    assert sorted(index for share in found for index in share) == list(range(8))
    assert [share for share in found if {4, 5, 6, 7} & set(share)] == [[4, 5, 6, 7]]


def test_a_cpu_that_stands_for_a_gpu() -> None:
    program = """
import torch
import cuda_on_cpu

cuda_on_cpu.install((9, 0))
made = [
    torch.randn(2, device="cuda"), torch.zeros(2, device=torch.device("cuda", 0)),
    torch.ones(2).to("cuda"), torch.ones(2).to(device="cuda:1", dtype=torch.float16),
    torch.ones(2).cuda(), torch.ones(2).new_empty(2, device="cuda"),
    next(torch.nn.Linear(2, 2).cuda().parameters()),
]
assert {x.device.type for x in made} == {"cpu"}, made
assert made[3].dtype == torch.float16
assert torch.cuda.get_device_capability() == (9, 0)
torch.cuda.synchronize()
for dtype, step in ((torch.float16, 2.0**-12), (torch.bfloat16, 2.0**-9)):
    x = torch.zeros(2, dtype=dtype, requires_grad=True)
    y = 0.3 + x - 0.3  # the number in 16 bits less the number in float32
    assert y.dtype == dtype and 0.0 < y[0].item() < step, y
    assert torch.equal(0.3 - (x + 0.3), -y)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
assert torch.equal(torch.zeros(2) + 0.3 - 0.3, torch.zeros(2))
"""
    paths = os.pathsep.join([str(TESTS), *sys.path])
    subprocess.run(
        [sys.executable, "-c", program], check=True,
        env=os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
