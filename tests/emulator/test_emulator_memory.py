"""Loads and stores one by one: global, flat, buffer, scratch, scalar, and direct to LDS."""

from __future__ import annotations

import numpy as np
import pytest
import test_emulator_atomics as atomics
import test_emulator_lds as lds
from memory_instructions import BYTES, LOADS, OLD, RAN, STORES, WAIT, U, data, launch, registers

from pyfa.emulator import tables


@pytest.mark.parametrize("place", ["global", "global_saddr", "flat", "buffer", "scratch"])
def test_loads(place: str) -> None:
    inputs, offset = data(), 4
    snippets, checks = [], []
    for name, expect in LOADS.items():
        count = len(expect(bytes(16)))
        to = registers(count)
        text = {
            "global": f"global_load_{name} {to}, v[2:3], off offset:{offset}",
            "global_saddr": f"global_load_{name} {to}, v1, s[4:5] offset:{offset}",
            "flat": f"flat_load_{name} {to}, v[2:3] offset:{offset}",
            "buffer": f"buffer_load_{name} {to}, v1, s[8:11], 0 offen offset:{offset}",
            "scratch": f"scratch_load_{name} {to}, off, off offset:{offset}",
        }[place]
        fill = "global_load_dwordx4 v[12:15], v[2:3], off\n"
        fill += "global_load_dwordx4 v[16:19], v[2:3], off offset:16\n"
        fill += (
            WAIT
            + "scratch_store_dwordx4 off, v[12:15], off\n"
            + "scratch_store_dwordx4 off, v[16:19], off offset:16\n"
        )
        reset = "".join(f"v_mov_b32 v{n}, 0x{OLD:x}\n" for n in range(8, 12))
        store = "global_store_dwordx4 v1, v[8:11], s[6:7]\n"
        advance = f"s_add_u32 s6, s6, {BYTES}\ns_addc_u32 s7, s7, 0\n"
        snippets.append(
            (fill if place == "scratch" else "") + reset + text + "\n" + WAIT + store + advance
        )
        checks.append((name, expect))
    outputs = np.zeros((len(snippets), BYTES), np.uint8)
    launch("\n".join(snippets), inputs, outputs)
    for (name, expect), out in zip(checks, outputs, strict=True):
        for lane in range(64):
            source = bytes(inputs[64 * lane + offset : 64 * lane + offset + 16])
            wanted = [v & 0xFFFFFFFF for v in expect(source)]
            wanted += [OLD] * (4 - len(wanted))
            assert out[64 * lane : 64 * lane + 16].view(U).tolist() == wanted, (name, lane)


@pytest.mark.parametrize("place", ["global", "flat", "buffer", "scratch"])
def test_stores(place: str) -> None:
    inputs, snippets = data(1), []
    for name, (size, _) in STORES.items():
        value = registers(max(size // 4, 1))
        body = "global_load_dwordx4 v[8:11], v[2:3], off\n" + WAIT
        body += {
            "global": f"global_store_{name} v[4:5], {value}, off offset:8",
            "flat": f"flat_store_{name} v[4:5], {value} offset:8",
            "buffer": f"buffer_store_{name} {value}, v1, s[12:15], 0 offen offset:8",
            "scratch": f"v_mov_b32 v20, 8\nscratch_store_{name} v20, {value}, off\n{WAIT}"
            "scratch_load_dwordx4 v[8:11], v20, off\n"
            + WAIT
            + "global_store_dwordx4 v[4:5], v[8:11], off offset:8",
        }[place]
        body += f"\nv_lshl_add_u64 v[4:5], v[30:31], 0, v[4:5]\ns_add_u32 s12, s12, {BYTES}\n"
        body += "s_addc_u32 s13, s13, 0\n"
        snippets.append(body)
    outputs = np.full((len(snippets), BYTES), 0, np.uint8)
    launch(f"v_mov_b32 v30, {BYTES}\nv_mov_b32 v31, 0\n" + "\n".join(snippets), inputs, outputs)
    kept = np.zeros((64, 16), np.uint8)  # scratch keeps what the snippets before stored
    for (name, (size, high)), out in zip(STORES.items(), outputs, strict=True):
        for lane in range(64):
            source = inputs[64 * lane : 64 * lane + 16]
            wanted = kept[lane] if place == "scratch" else np.zeros(16, np.uint8)
            wanted[:size] = source[high : high + size]
            got = out[64 * lane + 8 : 64 * lane + 24]
            assert (got == wanted).all(), (name, lane)


def test_buffer_ranges_and_scalar_offset() -> None:
    inputs, outputs = data(2), np.zeros((3, BYTES), np.uint8)
    body = "s_mov_b32 s10, 0x210\ns_mov_b32 s20, 8\n"
    for text in (
        "buffer_load_dwordx2 v[8:9], v1, s[8:11], s20 offen offset:4",
        "s_mov_b32 s9, s9\nbuffer_load_ushort v8, v1, s[8:11], 0 offen",
        "s_mov_b32 s10, 40\ns_or_b32 s9, s9, 0x400000\nv_mov_b32 v20, v0\nv_mov_b32 v21, 4\n"
        "buffer_load_dword v8, v[20:21], s[8:11], 0 idxen offen",
    ):
        body += text + "\n" + WAIT + "global_store_dwordx4 v1, v[8:11], s[6:7]\n"
        body += f"s_add_u32 s6, s6, {BYTES}\ns_addc_u32 s7, s7, 0\n"
    body += "s_and_b32 s13, s13, 0xffff\ns_mov_b32 s14, 0x100\n"
    body += "buffer_store_dword v0, v1, s[12:15], 0 offen offset:60"
    counters = launch(body, inputs, outputs)
    for lane in range(64):
        at = 64 * lane
        wide = [
            int(inputs[at + 12 + n : at + 16 + n].view(U)[0]) if at + 16 + n <= 0x210 else 0
            for n in (0, 4)
        ]
        assert outputs[0, at : at + 8].view(U).tolist() == wide
        short = int(inputs[at : at + 2].view(np.uint16)[0]) if at + 2 <= 0x210 else 0
        assert outputs[1, at : at + 4].view(U)[0] == short
        indexed = int(inputs[at + 4 : at + 8].view(U)[0]) if lane < 40 else 0
        assert outputs[2, at : at + 4].view(U)[0] == indexed
        assert outputs[0, at + 60 : at + 64].view(U)[0] == (lane if at + 64 <= 0x100 else 0)
    assert counters.buffer_out_of_range == (64 - 8) + (64 - 9) + (64 - 40) + (64 - 4)


def test_direct_to_lds() -> None:
    inputs, outputs = data(6), np.zeros((2, 64), U)
    body = "v_lshlrev_b32 v20, 2, v0\n"
    for base, text in (
        (256, "buffer_load_dword v1, s[8:11], 0 offen offset:4 lds"),
        (1024, "global_load_lds_dword v1, s[4:5] offset:4"),
    ):
        body += (
            f"s_mov_b32 m0, {base}\ns_nop 0\n{text}\n{WAIT}ds_read_b32 v8, v20 offset:{base + 4}\n"
        )
        body += f"{WAIT}global_store_dword v20, v8, s[6:7]\n"
        body += "s_add_u32 s6, s6, 256\ns_addc_u32 s7, s7, 0\n"
    counters = launch(body, inputs, outputs)
    assert (outputs == inputs.view(U).reshape(64, 16)[:, 1]).all()
    assert counters.lds_direct_bytes == counters.lds_read_bytes == 2 * 64 * 4
    assert counters.lds_write_bytes == 0


def test_scalar_loads() -> None:
    inputs, outputs = data(7), np.zeros((13, 16), U)
    body, checks = "v_mov_b32 v20, 0\ns_mov_b32 s20, 16\n", []
    for buffer in (False, True):
        for count in (1, 2, 4, 8, 16):
            name = (
                f"s_{'buffer_' if buffer else ''}load_dword{'x' + str(count) if count > 1 else ''}"
            )
            base = "s[8:11]" if buffer else "s[4:5]"
            to = f"s[32:{31 + count}]" if count > 1 else "s32"
            checks.append((f"{name} {to}, {base}, 0x20", count, 8))
    checks += [
        ("s_load_dword s32, s[4:5], s20", 1, 4),
        ("s_load_dword s32, s[4:5], s20 offset:0x20", 1, 12),
        ("s_buffer_load_dword s32, s[8:11], s20", 1, 4),
    ]
    for text, count, _ in checks:
        body += text + "\n" + WAIT
        for n in range(count):
            body += f"v_mov_b32 v8, s{32 + n}\nglobal_store_dword v20, v8, s[6:7] offset:{4 * n}\n"
        body += "s_add_u32 s6, s6, 64\ns_addc_u32 s7, s7, 0\n"
    launch(body, inputs, outputs)
    words = inputs.view(U)
    for (text, count, first), out in zip(checks, outputs, strict=True):
        assert out[:count].tolist() == words[first : first + count].tolist(), text


def test_cache_control() -> None:
    body = (
        "buffer_wbl2 sc1\n"
        + WAIT
        + "buffer_inv sc1\nv_mov_b32 v8, 1\nglobal_store_dword v1, v8, s[6:7]"
    )
    outputs = np.zeros(BYTES, np.uint8)
    launch(body, data(), outputs)
    assert outputs.view(U)[0] == 1


def test_every_memory_opcode_is_run() -> None:
    """Runs the tests of the three files once more, so that the count does not need their order."""
    for place in ("global", "global_saddr", "flat", "buffer", "scratch"):
        test_loads(place)
    for place in ("global", "flat", "buffer", "scratch"):
        test_stores(place)
    for place in ("global", "flat", "buffer", "ds"):
        atomics.test_atomics(place)
    for test in (
        lds.test_ds_reads_and_writes,
        lds.test_exchanges,
        test_direct_to_lds,
        test_scalar_loads,
        test_cache_control,
    ):
        test()
    known = {
        n for t in (tables.DS, tables.MUBUF, tables.GLOBAL, tables.SCRATCH) for n in t.values()
    }
    known |= {n.replace("global_", "flat_") for n in tables.GLOBAL.values() if "lds" not in n}
    known |= {n for n in tables.SMEM.values() if "load" in n}
    assert sorted(known - RAN) == []
