"""LDS reads and writes, and exchanges between lanes, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from memory_instructions import BYTES, LANES, LOADS, OLD, WAIT, U, data, launch, registers

DS_READS = {
    "b32": LOADS["dword"],
    "b64": LOADS["dwordx2"],
    "b96": LOADS["dwordx3"],
    "b128": LOADS["dwordx4"],
    "u8": LOADS["ubyte"],
    "i8": LOADS["sbyte"],
    "u16": LOADS["ushort"],
    "i16": LOADS["sshort"],
    "u8_d16": LOADS["ubyte_d16"],
    "u8_d16_hi": LOADS["ubyte_d16_hi"],
    "i8_d16": LOADS["sbyte_d16"],
    "i8_d16_hi": LOADS["sbyte_d16_hi"],
    "u16_d16": LOADS["short_d16"],
    "u16_d16_hi": LOADS["short_d16_hi"],
}


def test_ds_reads_and_writes() -> None:
    inputs = data(4)
    body = "global_load_dwordx4 v[12:15], v[2:3], off\n" + WAIT + "ds_write_b128 v1, v[12:15]\n"
    body += "ds_write_b128 v1, v[12:15] offset:16\nds_write_b128 v1, v[12:15] offset:4096\n" + WAIT
    checks: list[tuple[str, Callable[[bytes], list[int]], int]] = []

    def emit(text: str, count: int, expect: Callable[[bytes], list[int]]) -> None:
        nonlocal body
        body += "".join(f"v_mov_b32 v{n}, 0x{OLD:x}\n" for n in range(8, 12)) + text + "\n" + WAIT
        body += "global_store_dwordx4 v1, v[8:11], s[6:7]\n"
        body += f"s_add_u32 s6, s6, {BYTES}\ns_addc_u32 s7, s7, 0\n"
        checks.append((text, expect, count))

    for name, expect in DS_READS.items():
        count = len(expect(bytes(16)))
        emit(
            f"ds_read_{name} {registers(count)}, v1 offset:4",
            count,
            lambda b, f=expect: f(b[4:] + b[:4]),
        )
    words = LOADS["dwordx4"]
    emit("ds_read2_b32 v[8:9], v1 offset0:1 offset1:3", 2, lambda b: [words(b)[1], words(b)[3]])
    emit(
        "ds_read2st64_b32 v[8:9], v1 offset0:0 offset1:16", 2, lambda b: [words(b)[0], words(b)[0]]
    )
    emit("ds_read2_b64 v[8:11], v1 offset0:1 offset1:0", 4, lambda b: words(b)[2:] + words(b)[:2])
    emit("ds_read2st64_b64 v[8:11], v1 offset0:8 offset1:0", 4, lambda b: words(b)[:2] * 2)
    emit(
        "v_mov_b32 v8, v1\nds_read2_b32 v[8:9], v8 offset0:1 offset1:2",
        2,
        lambda b: [words(b)[1], words(b)[2]],
    )  # the address is one of the destinations
    clear = "v_mov_b32 v20, 0\nv_mov_b32 v21, 0\n"
    clear += "ds_write2_b64 v1, v[20:21], v[20:21] offset0:4 offset1:5\n"
    read = f"\n{WAIT}ds_read_b128 v[8:11], v1 offset:32"

    def wrote(size: int, high: int = 0) -> Callable[[bytes], list[int]]:
        return lambda b: words(b[high : high + size] + bytes(16 - size))

    for name, (size, high) in {
        "b8": (1, 0),
        "b16": (2, 0),
        "b8_d16_hi": (1, 2),
        "b16_d16_hi": (2, 2),
        "b32": (4, 0),
        "b64": (8, 0),
        "b96": (12, 0),
        "b128": (16, 0),
    }.items():
        emit(
            f"{clear}ds_write_{name} v1, {registers(max(size // 4, 1), 12)} offset:32{read}",
            4,
            wrote(size, high),
        )
    emit(
        f"{clear}ds_write2_b32 v1, v12, v15 offset0:8 offset1:10{read}",
        4,
        lambda b: [words(b)[0], 0, words(b)[3], 0],
    )
    emit(
        f"{clear}ds_write2_b64 v1, v[14:15], v[12:13] offset0:4 offset1:5{read}",
        4,
        lambda b: words(b)[2:] + words(b)[:2],
    )
    emit(
        "ds_write2st64_b32 v1, v12, v13 offset0:1 offset1:17\n"
        + WAIT
        + "ds_read_b32 v8, v1 offset:4352",
        1,
        lambda b: [words(b)[1]],
    )
    emit(
        "ds_write2st64_b64 v0, v[12:13], v[14:15] offset0:15 offset1:14\n"
        + WAIT
        + "ds_read_b64 v[8:9], v0 offset:7168",
        2,
        lambda b: None,
    )
    checks.pop()
    emit("ds_nop\nv_mov_b32 v8, 5", 1, lambda b: [5])
    outputs = np.zeros((len(checks) + 1, BYTES), np.uint8)
    body = body.replace("ds_write2st64_b64 v0,", "v_lshlrev_b32 v20, 3, v0\nds_write2st64_b64 v20,")
    body = body.replace("ds_read_b64 v[8:9], v0 offset:7168", "ds_read_b64 v[8:9], v20 offset:7168")
    launch(body, inputs, outputs)
    stored = [*outputs[: len(checks) - 1], outputs[-1]]
    for (text, expect, _), out in zip(checks, stored, strict=True):
        for lane in range(64):
            wanted = [v & 0xFFFFFFFF for v in expect(bytes(inputs[64 * lane : 64 * lane + 16]))]
            wanted += [OLD] * (4 - len(wanted))
            assert out[64 * lane : 64 * lane + 16].view(U).tolist() == wanted, (text, lane)
    pairs = outputs[len(checks) - 1].reshape(64, 64)[:, :8]
    assert (pairs == inputs.reshape(64, 64)[:, 8:16]).all()


EXCHANGES: dict[str, tuple[str, Any]] = {
    "permute": ("ds_permute_b32 v8, v20, v12", np.argsort((LANES * 7 + 3) % 64)),
    "bpermute": ("ds_bpermute_b32 v8, v20, v12", (LANES * 7 + 3) % 64),
    "bpermute_offset": ("ds_bpermute_b32 v8, v20, v12 offset:8", (LANES * 7 + 5) % 64),
    "swap 16": ("ds_swizzle_b32 v8, v12 offset:swizzle(SWAP,16)", LANES ^ 16),
    "reverse": ("ds_swizzle_b32 v8, v12 offset:swizzle(REVERSE,8)", LANES ^ 7),
    "broadcast": ("ds_swizzle_b32 v8, v12 offset:swizzle(BROADCAST,8,3)", LANES // 8 * 8 + 3),
    "quad": (
        "ds_swizzle_b32 v8, v12 offset:swizzle(QUAD_PERM,1,3,0,2)",
        LANES // 4 * 4 + np.array([1, 3, 0, 2])[LANES % 4],
    ),
}


def test_exchanges() -> None:
    inputs, outputs = data(5), np.zeros((len(EXCHANGES), BYTES), np.uint8)
    body = (
        "global_load_dword v12, v[2:3], off\nv_mul_u32_u24 v20, 28, v0\nv_add_u32 v20, 12, v20\n"
        + WAIT
    )
    for text, _ in EXCHANGES.values():
        body += f"{text}\n{WAIT}global_store_dword v1, v8, s[6:7]\n"
        body += f"s_add_u32 s6, s6, {BYTES}\ns_addc_u32 s7, s7, 0\n"
    launch(body, inputs, outputs)
    values = inputs.view(U).reshape(64, 16)[:, 0]
    for (name, (_, source)), out in zip(EXCHANGES.items(), outputs, strict=True):
        assert (out.view(U).reshape(64, 16)[:, 0] == values[source]).all(), name


# An access, the places of its lanes, and what phases make of them, worked out by hand: clocks that
# a wave takes, and those of them that a bank waits.
def row(stride: int) -> Any:
    return LANES * stride


CROSSED = 16 * (LANES ^ (LANES >> 4 & 1) * 4)
BANKS: dict[str, tuple[str, Any, int, int]] = {
    "4 bytes": ("ds_read_b32 v8, v20", row(4), 2, 0),
    "4 bytes, every other bank": ("ds_read_b32 v8, v20", row(8), 4, 2),
    "4 bytes, a column of a padded row": ("ds_write_b32 v20, v8", row(132), 2, 0),
    "4 bytes, one for all": ("ds_read_b32 v8, v20", row(0), 2, 0),
    "2 bytes": ("ds_read_u16 v8, v20", row(2), 2, 0),
    # 16 lanes ask for 32 dwords; two apart from 8 lanes on in the same bank.
    "8 bytes": ("ds_read_b64 v[8:9], v20", row(8), 4, 0),
    "8 bytes, every other place": ("ds_read_b64 v[8:9], v20", row(16), 8, 4),
    "8 bytes written": ("ds_write_b64 v20, v[8:9]", row(8), 4, 0),
    "8 bytes written, every other place": ("ds_write_b64 v20, v[8:9]", row(16), 8, 4),
    "2 times 4 bytes": ("ds_read2_b32 v[8:9], v20 offset1:1", row(8), 8, 4),
    # Lanes 0 to 3 have dwords 0 to 11, 20 to 23 have 60 to 71, which are banks 28 to 31 and 0 to 7.
    "12 bytes": ("ds_read_b96 v[8:10], v20", row(12), 16, 8),
    "12 bytes written": ("ds_write_b96 v20, v[8:10]", row(12), 8, 0),
    "16 bytes": ("ds_read_b128 v[8:11], v20", row(16), 8, 0),
    "16 bytes written": ("ds_write_b128 v20, v[8:11]", row(16), 8, 0),
    "16 bytes, every other place": ("ds_read_b128 v[8:11], v20", row(32), 16, 8),
    # Lanes 20 to 23 change places with 16 to 19, and so on: no two of 16 in a row, nor of 8, share
    # a bank, but lanes 0 to 3 and 20 to 23 do.
    "16 bytes, crossed": ("ds_read_b128 v[8:11], v20", CROSSED, 16, 8),
    "16 bytes written, crossed": ("ds_write_b128 v20, v[8:11]", CROSSED, 8, 0),
    "16 bytes, one for all": ("ds_read_b128 v[8:11], v20", row(0), 8, 0),
    # One clock for a dword that lanes of one phase share, two where they are of different phases.
    "16 bytes, lanes 0 and 20 the same": (
        "ds_read_b128 v[8:11], v20", np.where(LANES == 20, 0, 16 * LANES), 8, 0
    ),
    "16 bytes, lanes 0 and 20 in one bank": (
        "ds_read_b128 v[8:11], v20", np.where(LANES == 20, 1024, 16 * LANES), 9, 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BANKS)
def test_bank_conflicts(name: str) -> None:
    text, places, clocks, conflicts = BANKS[name]
    inputs, outputs = data(6), np.zeros((1, BYTES), np.uint8)
    inputs.view(U).reshape(64, 16)[:, 0] = places
    counters = launch(f"global_load_dword v20, v[2:3], off\n{WAIT}{text}\n{WAIT}", inputs, outputs)
    assert (counters.lds_clocks, counters.lds_conflict_clocks) == (clocks, conflicts)
