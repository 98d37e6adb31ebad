"""Workgroups that meet in global memory: races are found and named, what is ordered is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_emulator_faults import S_NOP, assembled, patched, sites
from test_emulator_kernels import run

from pyfa.backends.hip.compiler import compile_hip
from pyfa.emulator import Checks, EmulatorError, Program, load

SOURCE = Path(__file__).with_name("grids.hip")
U = np.uint32
GROUPS = 6
SEEDS = range(5)


@pytest.fixture(scope="module")
def built() -> bytes:
    return compile_hip(SOURCE.read_text(), arch="gfx942", options=())


@pytest.fixture(scope="module")
def program(built: bytes) -> Program:
    return load(built)


def floats(count: int) -> Any:
    return np.zeros(count, np.float32)


def go(program: Program, name: str, *arguments: Any, block: int = 128, **machine: Any) -> Any:
    return run(program, name, (GROUPS,), (block,), *arguments, **machine)


def raced(program: Program, name: str, *arguments: Any, **machine: Any) -> str:
    with pytest.raises(EmulatorError) as error:
        go(program, name, *arguments, **machine)
    text = str(error.value)
    assert error.value.check == "global_races", text
    assert f"kernel {name}, pc 0x" in text
    assert "'argument" in text
    return text


@pytest.mark.parametrize("seed", SEEDS)
def test_two_stores(program: Program, seed: int) -> None:
    text = raced(program, "overlapping_tiles", floats(128 * GROUPS), seed=seed)
    assert "store to 0x" in text
    assert "is written by workgroup (" in text
    assert "global_store_dword" in text


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_and_a_load(program: Program, seed: int) -> None:
    """Whichever comes first: the seeds have both."""
    text = raced(program, "read_neighbor", floats(128), floats(128 * GROUPS), GROUPS, seed=seed)
    assert "is read by workgroup" in text or "is written by workgroup" in text


def test_a_load_first_and_a_store_first(program: Program) -> None:
    found = {
        "is read by" in raced(
            program, "read_neighbor", floats(128), floats(128 * GROUPS), GROUPS, seed=seed
        )
        for seed in range(8)
    }  # fmt: skip
    assert found == {False, True}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_and_an_atomic(program: Program, seed: int) -> None:
    raced(program, "store_and_add", floats(128), seed=seed)


def test_single_bytes(program: Program) -> None:
    raced(program, "bytes_race", np.zeros(128 + GROUPS, np.int8))
    raced(program, "bytes_after_dwords", np.zeros(128 * GROUPS, U), GROUPS)
    x = np.zeros(128 * GROUPS, np.int16)
    go(program, "halves", x, GROUPS)
    assert (x.reshape(128, GROUPS) == np.arange(GROUPS)).all()


def test_sixteen_bytes_anywhere(program: Program) -> None:
    """Unaligned by 4 or whole, over the ends of pages of tags."""
    go(program, "quads", floats(128 * GROUPS * 5), 5)
    raced(program, "quads", floats(128 * GROUPS * 4), 3)


def last(program: Program, name: str, **machine: Any) -> Any:
    part, count, out = floats(128 * GROUPS), np.zeros(1, np.uint32), floats(128)
    go(program, name, part, count, out, GROUPS, **machine)
    return out


@pytest.mark.parametrize("seed", SEEDS)
def test_a_counter_with_fences_orders_workgroups(program: Program, seed: int) -> None:
    want = GROUPS * np.arange(128) + GROUPS * (GROUPS - 1) / 2
    for threads in (1, 2):
        assert (last(program, "last_right", seed=seed, threads=threads) == want).all()


@pytest.mark.parametrize("name", ["last_without_release", "last_without_acquire"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_counter_without_a_fence_does_not(program: Program, name: str, seed: int) -> None:
    with pytest.raises(EmulatorError, match=r"global_races.*load of"):
        last(program, name, seed=seed)


@pytest.mark.parametrize("mnemonic", ["buffer_wbl2", "buffer_inv"])
def test_fences_that_are_patched_away(built: bytes, mnemonic: str) -> None:
    """Both are 8 bytes long: two s_nop take the place of one."""
    index = next(n for n in sites(built, "last_right", mnemonic))
    code = load(built)
    pc = int(code.code.instructions["pc"][index])
    word = code.object.image[pc : pc + 8]
    changed = built.replace(word, S_NOP.to_bytes(4, "little") * 2)
    with pytest.raises(EmulatorError, match="global_races"):
        last(load(changed), "last_right")


def takes(program: Program, **machine: Any) -> tuple[Any, Any]:
    total, count, out = floats(256), np.zeros(1, np.uint32), floats(256)
    go(program, "last_takes", total, count, out, GROUPS, block=256, **machine)
    return total, out


def test_the_last_takes_what_all_have_added(program: Program) -> None:
    for seed in SEEDS:
        total, out = takes(program, seed=seed)
        assert (out == 4 * GROUPS * (GROUPS + 1) / 2).all()
        assert (total == 0).all()


def test_the_wait_for_atomics_before_the_counter(built: bytes) -> None:
    """Without it the counter may be seen before the sums."""
    fence = sites(built, "last_takes", "buffer_wbl2")[0]
    wait = next(n for n in sites(built, "last_takes", "s_waitcnt") if n > fence)
    broken = patched(built, "last_takes", wait)
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match="global_races"):
            takes(broken, seed=seed)


def test_counted_and_off(program: Program) -> None:
    x = floats(128 * GROUPS)
    counted = go(program, "overlapping_tiles", x, checks=Checks(global_races="count"))
    assert counted.violations["global_races"] == GROUPS - 1
    off = go(program, "overlapping_tiles", x, checks=Checks(global_races="off"))
    assert off.violations["global_races"] == 0


def test_one_workgroup_races_with_nobody() -> None:
    body = "s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_mov_b32 v1, 0\ns_waitcnt lgkmcnt(0)\n"
    body += "global_store_dword v1, v1, s[4:5]\nglobal_load_dword v2, v1, s[4:5]\n"
    assembled(body, floats(1), block=256)
