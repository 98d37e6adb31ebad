"""What a GPU is taken for, by what torch and Linux's driver tell of it: stand-ins for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pyfa import device
from pyfa.device import DEVICES, GIB, Device

Show = Callable[..., Device]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Show]:
    """The device that torch shows as ``name`` with so many CUs; ``xccs``: what the driver says."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(device.dies_by_driver, "__defaults__", (tmp_path,))

    def show(name: str, units: int, xccs: int | None = None, **more: object) -> Device:
        place = {"pci_domain_id": 1, "pci_bus_id": 0x47, "pci_device_id": 0}
        told = SimpleNamespace(
            name=name, multi_processor_count=units, gcnArchName="gfx942:sramecc+:xnack-",
            total_memory=24 * GIB, **(place if xccs is not None else {}), **more,
        )  # fmt: skip
        if xccs is not None:
            (tmp_path / "3").mkdir(exist_ok=True)
            lines = f"simd_count {4 * units}\ndomain 1\nlocation_id {0x4700}\nnum_xcc {xccs}\n"
            (tmp_path / "3" / "properties").write_text(lines)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: told)
        device._read.cache_clear()
        return device.of(torch.device("cuda", 0))

    yield show
    device._read.cache_clear()


@pytest.mark.parametrize(
    ("name", "units", "dies", "gb", "cache_mib"),
    [
        ("AMD Instinct MI300X", 304, 8, 5300, 256),
        ("AMD Instinct MI300X", 152, 4, 2650, 128),  # DPX
        ("AMD Instinct MI300X", 76, 2, 1325, 64),  # QPX
        ("AMD Instinct MI300X", 38, 1, 662.5, 32),  # CPX
        ("AMD Instinct MI325X", 304, 8, 6000, 256),
        ("AMD Instinct MI325X", 38, 1, 750, 32),
        ("AMD Instinct MI300A", 228, 6, 5300, 256),
        ("AMD Instinct MI300A", 76, 2, 5300 / 3, 256 // 3),  # TPX
        ("AMD Instinct MI308X", 80, 4, 5300, 256),
        ("AMD Instinct MI308X", 20, 1, 1325, 64),
        # A driver without the card's name: the one that has as many.
        ("", 152, 4, 2650, 128),
        ("AMD Radeon Graphics", 80, 4, 5300, 256),
    ],
)
def test_a_card_and_its_parts(
    show: Show, name: str, units: int, dies: int, gb: float, cache_mib: int
) -> None:
    """By CUs alone: torch says neither which GPU it is nor how many XCDs there are."""
    found = show(name, units)
    assert (found.name, found.arch, found.units, found.dies) == (name, "gfx942", units, dies)
    assert found.bandwidth == pytest.approx(gb * 1e9)
    assert found.cache_bytes // device.MIB == cache_mib
    assert (found.memory_bytes, found.l2_bytes) == (24 * GIB, 4 * device.MIB)


def test_the_driver_knows_better(show: Show) -> None:
    """The XCDs of a card that has no row, and of one whose row is wrong."""
    assert show("AMD Instinct MI399X", 100, xccs=5).dies == 5
    assert show("AMD Instinct MI308X", 80, xccs=8).dies == 8


def test_where_the_driver_is_silent(show: Show) -> None:
    assert show("AMD Instinct MI300X", 304, xccs=0).dies == 8
    elsewhere = {"pci_domain_id": 0, "pci_bus_id": 1, "pci_device_id": 0}
    assert show("AMD Instinct MI300X", 152, **elsewhere).dies == 4
    # 114 CUs are three XCDs of some card: nothing else is known.
    found = show("AMD Instinct MI399X", 114)
    assert (found.dies, found.bandwidth, found.clock) == (3, 0, 0)
    assert show("AMD Instinct MI399X", 100).dies == 1


def test_nvidia_is_not_asked(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    found = show("NVIDIA H200", 132, xccs=8, major=9, minor=0)
    assert (found.arch, found.dies, found.bandwidth) == ("sm_90a", 1, DEVICES["H200"].bandwidth)


@pytest.mark.parametrize(
    ("name", "units", "dies"),
    [("MI300X-DPX", 152, 4), ("MI300X-QPX", 76, 2), ("MI300X-CPX", 38, 1), ("MI300A", 228, 6)],
)
def test_named_ones(name: str, units: int, dies: int) -> None:
    assert (DEVICES[name].units, DEVICES[name].dies) == (units, dies)
    assert DEVICES["MI300X-CPX"].memory_bytes == 24 * GIB


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("B200", "sm_100"), ("RTX 5090", "sm_120"), ("NVIDIA GeForce RTX 4090", "sm_89"),
        ("4090", "sm_89"), ("rtx-3090", "sm_86"), ("L40S", "sm_89"), ("A100", "sm_80"),
        ("MI300A", "gfx942"), ("AMD Instinct MI325X", "gfx942"), ("mi308x", "gfx942"),
        ("MI300X CPX", "gfx942"), ("MI355X", "gfx950"), ("RX 7900 XTX", "gfx1100"),
    ],
)  # fmt: skip
def test_names_that_people_use(name: str, arch: str) -> None:
    assert device.by_name(name).arch == arch


@pytest.mark.parametrize(
    ("name", "why"),
    [("V100", "needs sm_80"), ("NVIDIA T4", "needs sm_80"), ("MI100", "needs gfx942"),
     ("MI9", "expected one of MI300X, ")],
)  # fmt: skip
def test_names_that_it_has_no_kernels_for(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        device.by_name(name)


def test_peaks_are_the_data_sheets() -> None:
    """Dense bfloat16 with float32 sums, within 2 %; AMD's peak clock, NVIDIA's boost."""
    sheets = {"B200": 2250, "RTX5090": 209.5, "RTX4090": 165.2, "RTX3090": 71, "H200": 989,
              "A100-80GB": 312, "MI300X": 1307.4, "MI355X": 2516.6, "RX7900XTX": 122.8}  # fmt: skip
    for name, tflops in sheets.items():
        assert DEVICES[name].matrix_flops("bfloat16") / 1e12 == pytest.approx(tflops, rel=0.02)
