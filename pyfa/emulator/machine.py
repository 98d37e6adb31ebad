"""An emulated gfx942 device: memory, code objects, launches."""

from __future__ import annotations

import ctypes
import re
import struct
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pyfa import codeobject
from pyfa.codeobject import Kernel
from pyfa.emulator import native
from pyfa.emulator.counters import CHECKS, MFMA_CLOCKS, SUMS, Counters, Totals
from pyfa.emulator.decode import Code, decode_functions
from pyfa.emulator.text import text_of
from pyfa.emulator.timing.trace import Recorder
from pyfa.errors import CodeObjectError

Policy = Literal["raise", "count", "off"]
_POLICY = {"off": 0, "raise": 1, "count": 2}
_KINDS = (*CHECKS, "unknown instruction", "unsupported", "trap", "limit")

# Device addresses of what the emulator itself provides: beyond the 47 bits that a host process
# maps, and within the 48 that a device address and a buffer descriptor have.
IMAGE_BASE = 0xE000_0000_0000
KERNARG_BASE = 0xE100_0000_0000
DISPATCH_BASE = 0xE200_0000_0000
LDS_LIMIT = 65536
PRELOAD_PROLOGUE = 256  # bytes that firmware with kernarg preload skips at a kernel's entry


class EmulatorError(RuntimeError):
    """An error that the emulator found, or something it cannot do. ``check`` is the check's name or
    the kind of error."""

    def __init__(self, check: str, message: str, pc: int = 0) -> None:
        self.check = check
        self.pc = pc
        super().__init__(f"{check}: {message}")


@dataclass(frozen=True)
class Checks:
    """The policy for each kind of fault: "raise" an ``EmulatorError``, "count" it, or "off".

    ``undefined``: a value that was never written reaches an address, a store, a branch or EXEC.
    Definedness is tracked through registers and LDS, because compilers copy undefined lanes that
    they never use. ``memory``: an access is outside every mapped region, or outside the workgroup's
    LDS. ``races``: two waves access one LDS byte between two barriers, and one of them writes.
    ``waits``: a register or LDS byte is used before an ``s_waitcnt`` covers the load that fills it.
    ``barriers``: a wave ends without reaching a barrier that others wait at. ``alignment``: an
    atomic, a scalar load or an LDS access of a dword or more is not naturally aligned.
    ``global_races``: two workgroups access one byte of global memory, one of them writes, not both
    accesses are atomic, and no atomic at agent scope with its fences orders them.
    """

    undefined: Policy = "raise"
    memory: Policy = "raise"
    races: Policy = "raise"
    waits: Policy = "raise"
    barriers: Policy = "raise"
    alignment: Policy = "raise"
    global_races: Policy = "raise"

    @classmethod
    def off(cls) -> Checks:
        """Return a policy that checks nothing but memory bounds, which protect the host."""
        return cls("off", "raise", "off", "off", "off", "off", "off")


class _Region(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64), ("size", ctypes.c_uint64), ("host", ctypes.c_void_p),
        ("writable", ctypes.c_uint32), ("id", ctypes.c_uint32),
    )  # fmt: skip


class _Fault(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint32), ("kind", ctypes.c_uint32), ("pc", ctypes.c_uint32),
        ("wave", ctypes.c_uint32), ("lane", ctypes.c_int32), ("workgroup", ctypes.c_uint32 * 3),
        ("text", ctypes.c_char * 240),
    )  # fmt: skip


class _Launch(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_void_p), ("index_of", ctypes.c_void_p), ("regions", ctypes.c_void_p),
        ("order", ctypes.c_void_p), ("shadow", ctypes.c_void_p),
        ("image_base", ctypes.c_uint64), ("kernarg_address", ctypes.c_uint64),
        ("dispatch_address", ctypes.c_uint64), ("queue_address", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in (
            "code_count", "first_pc", "code_bytes", "entry", "region_count")),
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3),
        *((name, ctypes.c_uint32) for name in (
            "lds_bytes", "scratch_bytes", "mode", "user_sgprs", "user_bits", "rsrc2",
            "preload_length", "preload_offset", "vgpr_rows", "in_order")),
        ("seed", ctypes.c_uint64), ("max_instructions", ctypes.c_uint64),
        ("rounding", ctypes.c_uint64),
        ("policy", ctypes.c_uint8 * 8), ("next_workgroup", ctypes.c_uint64),
        ("trace", ctypes.c_void_p), ("fault", _Fault),
    )  # fmt: skip


@dataclass(frozen=True)
class Region:
    """``nbytes`` of device memory at ``address``, backed by host memory at ``host``."""

    address: int
    nbytes: int
    name: str
    host: int
    writable: bool


@dataclass(frozen=True)
class LoadedKernel:
    """One kernel of a loaded program: its metadata and its decoded code."""

    kernel: Kernel
    code: Code
    image: npt.NDArray[np.uint8]

    @property
    def adds_floats(self) -> bool:
        """Return whether the code has atomics whose result depends on their order."""
        return any("atomic" in n and ("add_f" in n or "add_bf" in n) for n in self.code.names)


@dataclass(frozen=True)
class Program:
    """A loaded code object."""

    object: codeobject.CodeObject
    code: Code
    image: npt.NDArray[np.uint8]

    def kernel(self, name: str) -> LoadedKernel:
        """Return the kernel called ``name``."""
        return LoadedKernel(self.object.kernel(name), self.code, self.image)


class Machine:
    """A device with its own address space.

    ``seed`` determines every order that the hardware leaves open: the order in which workgroups
    start, waves alternate, and atomics of different waves and lanes reach memory (core/pending.c).
    ``in_order`` fixes these orders: workgroups in sequence, each wave as far as it can run, atomics
    immediately and by lane. ``threads`` host threads share the workgroups. With float atomics,
    ``threads=1`` and the same ``seed`` give the same bits every time. ``max_instructions`` is a
    limit per wave that ends endless loops.

    ``rounding`` varies what AMD does not publish: the order of the products inside an MFMA, and the
    last bit of v_exp, v_log, v_rcp, v_rsq, v_sqrt, v_sin and v_cos. Each value of ``rounding``
    selects one fixed order and rounding; 0 selects ascending order and correct rounding.
    """

    def __init__(
        self,
        *,
        checks: Checks | None = None,
        seed: int = 0,
        threads: int = 1,
        in_order: bool = False,
        max_instructions: int = 1 << 28,
        rounding: int = 0,
    ) -> None:
        self.checks = checks or Checks()
        self.seed = seed
        self.threads = threads
        self.in_order = in_order
        self.max_instructions = max_instructions
        self.rounding = rounding
        self.regions: list[Region] = []

    def map(
        self,
        address: int,
        nbytes: int,
        name: str,
        *,
        host: int | None = None,
        writable: bool = True,
    ) -> Region:
        """Make ``nbytes`` of host memory visible at device ``address``, without a copy.

        ``host`` is the host address of this memory, by default the same number (a tensor's
        ``data_ptr()``). The caller keeps the memory alive. Every byte outside the mapped ranges is
        out of bounds.
        """
        if nbytes <= 0 or address <= 0 or address + nbytes > 1 << 63:
            raise ValueError(f"region {name!r}: {nbytes} bytes at 0x{address:x} are not a range")
        region = Region(address, nbytes, name, address if host is None else host, writable)
        at = bisect_right([r.address for r in self.regions], address)
        for other in self.regions[max(at - 1, 0) : at + 1]:
            if address < other.address + other.nbytes and other.address < address + nbytes:
                raise ValueError(f"region {name!r} overlaps {other.name!r}")
        self.regions.insert(at, region)
        return region

    def map_array(self, array: npt.NDArray[Any], name: str) -> int:
        """Map the bytes of a contiguous numpy array, without a copy, and return their device
        address."""
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            raise ValueError(f"array {name!r} is not contiguous")
        self.map(array.ctypes.data, array.nbytes, name)
        return array.ctypes.data

    def load(self, data: bytes) -> Program:
        """Parse and decode a code object's bytes."""
        return load(data)

    def launch(
        self,
        kernel: LoadedKernel,
        *,
        grid: Sequence[int],
        block: Sequence[int],
        kernarg: bytes,
        lds_bytes: int = 0,
        trace: Sequence[int] = (),
    ) -> Counters:
        """Run a whole grid.

        ``grid`` counts workgroups and ``block`` work-items, in up to three dimensions. ``kernarg``
        holds the explicit arguments; hidden ones are filled in from the metadata. ``lds_bytes`` is
        dynamic LDS on top of the kernel's own. Raises ``EmulatorError`` at the first fault.
        ``trace`` numbers workgroups (x + y·X + z·X·Y) whose execution is recorded for the timing
        model: ``Counters.traces``, in the same order.
        """
        facts = kernel.kernel
        size, items = _three(grid), _three(block)
        total = items[0] * items[1] * items[2]
        lds = facts.lds_bytes + lds_bytes
        if not 0 < total <= min(facts.max_workgroup_size, 1024):
            raise EmulatorError(
                "unsupported",
                f"{facts.name}: {total} work-items, at most {facts.max_workgroup_size}",
            )
        if lds > LDS_LIMIT:
            raise EmulatorError(
                "unsupported", f"{facts.name}: {lds} bytes of LDS, at most {LDS_LIMIT}"
            )
        if 0 in size:
            raise EmulatorError("unsupported", f"{facts.name}: the grid {size} is empty")
        arguments = np.frombuffer(_kernarg(facts, kernarg, size, items, lds_bytes), np.uint8)
        packet = np.frombuffer(_dispatch_packet(facts, size, items, lds), np.uint8)
        own = [
            Region(IMAGE_BASE, kernel.image.nbytes, "code object", kernel.image.ctypes.data, False),
            Region(KERNARG_BASE, arguments.nbytes, "kernarg", arguments.ctypes.data, False),
            Region(DISPATCH_BASE, 64, "dispatch packet", packet.ctypes.data, False),
        ]
        regions = sorted([*self.regions, *own], key=lambda region: region.address)
        table = (_Region * len(regions))(
            *(_Region(r.address, r.nbytes, r.host, r.writable, n) for n, r in enumerate(regions))
        )
        launch = self._launch(kernel, size, items, lds)
        launch.regions, launch.region_count = ctypes.addressof(table), len(regions)
        waves = _product(size) * ((total + 63) // 64)
        if not trace:
            return self._run(kernel, launch, regions, waves)
        recorder = Recorder(trace)
        try:
            launch.trace = recorder.handle
            counters = self._run(kernel, launch, regions, waves)
            return replace(counters, traces=recorder.traces())
        finally:
            recorder.close()

    def _launch(
        self, kernel: LoadedKernel, grid: tuple[int, ...], block: tuple[int, ...], lds: int
    ) -> _Launch:
        facts, code = kernel.kernel, kernel.code
        mode = (
            facts.rsrc1 >> 12 & 0xFF | (facts.rsrc1 >> 21 & 1) << 8 | (facts.rsrc1 >> 23 & 1) << 9
        )
        mode |= (facts.rsrc1 >> 26 & 1) << 23
        if mode & 15 or mode >> 6 & 3 != 3:
            raise EmulatorError(
                "unsupported",
                f"{facts.name}: rounding or f16/f64 denormal mode 0x{mode & 0xFF:02x}",
            )
        entry = facts.entry + (PRELOAD_PROLOGUE if facts.preload_dwords else 0)
        return _Launch(
            code=code.instructions.ctypes.data, index_of=code.index_of.ctypes.data,
            image_base=IMAGE_BASE, kernarg_address=KERNARG_BASE, dispatch_address=DISPATCH_BASE,
            queue_address=0, code_count=len(code.instructions), first_pc=code.first_pc,
            code_bytes=4 * len(code.index_of), entry=code.index_at(entry),
            grid=grid, block=block, lds_bytes=lds, scratch_bytes=facts.scratch_bytes, mode=mode,
            user_sgprs=facts.rsrc2 >> 1 & 31, user_bits=facts.properties & 0x7F, rsrc2=facts.rsrc2,
            preload_length=facts.preload_dwords, preload_offset=facts.preload_offset,
            vgpr_rows=min(256, 8 * ((facts.rsrc1 & 63) + 1)), in_order=self.in_order,
            seed=self.seed & 0xFFFF_FFFF_FFFF_FFFF, max_instructions=self.max_instructions,
            rounding=_spread(self.rounding),
            policy=(ctypes.c_uint8 * 8)(*(_POLICY[p] for p in asdict(self.checks).values())),
        )  # fmt: skip

    def _run(
        self, kernel: LoadedKernel, launch: _Launch, regions: list[Region], waves: int
    ) -> Counters:
        library, count = native.load(), len(kernel.code.instructions)
        groups = _product(launch.grid)
        workers = max(1, min(self.threads, groups))
        if not self.in_order:
            order = np.empty(groups, np.uint32)
            launch.order = order.ctypes.data
            library.emulator_order(
                ctypes.c_uint64(launch.seed), ctypes.c_void_p(launch.order), ctypes.c_uint64(groups)
            )
        executed = np.zeros((workers, count), np.uint64)
        totals = (Totals * workers)()

        def work(number: int) -> int:
            result: int = library.emulator_run(
                ctypes.byref(launch),
                ctypes.c_void_p(executed[number].ctypes.data),
                ctypes.byref(totals[number]),
            )
            return result

        if self.checks.global_races != "off":
            launch.shadow = library.emulator_shadow_new(ctypes.byref(launch))
            if not launch.shadow:
                raise MemoryError("the emulator could not allocate its check for global races")
        try:
            if workers == 1:
                failed = [work(0)]
            else:
                with ThreadPoolExecutor(workers) as pool:
                    failed = list(pool.map(work, range(workers)))
        finally:
            library.emulator_shadow_free(ctypes.c_void_p(launch.shadow))
        if launch.fault.set:
            raise _error(kernel, launch.fault, regions)
        if any(failed):
            raise MemoryError("the emulator could not allocate its waves")
        return _counters(kernel.code, executed.sum(axis=0), totals, waves)


def load(data: bytes) -> Program:
    """Parse and decode a code object's bytes. Raises ``CodeObjectError`` if it is not gfx942."""
    return prepare(codeobject.parse(data))


def prepare(parsed: codeobject.CodeObject) -> Program:
    """Decode the result of ``codeobject.parse``, or a code object made by a test."""
    if parsed.arch != "gfx942":
        raise CodeObjectError(f"the emulator runs gfx942 code objects, this one is {parsed.arch}")
    functions = [(f.address, f.code_bytes) for f in parsed.functions]
    if not functions:
        raise CodeObjectError("the code object has no functions")
    code = decode_functions(parsed.image, functions, native.operations())
    library, rows = native.load(), code.instructions
    library.emulator_prepare(ctypes.c_void_p(rows.ctypes.data), len(rows))
    flushes = any(k.rsrc1 >> 16 & 3 != 3 for k in parsed.kernels.values())
    if flushes or any(name.startswith("s_setreg") for name in code.names):
        library.emulator_flush_mode(ctypes.c_void_p(rows.ctypes.data), len(rows))
    return Program(parsed, code, np.frombuffer(parsed.image, np.uint8))


def pack_arguments(kernel: Kernel, values: Sequence[int | float | bytes]) -> bytes:
    """Return the bytes of the explicit arguments: ints (pointers too), floats (4 or 8 bytes) or raw
    structs."""
    explicit = [a for a in kernel.arguments if not a.kind.startswith("hidden_")]
    if len(values) > len(explicit):
        raise ValueError(f"{kernel.name} takes {len(explicit)} arguments, got {len(values)}")
    data = bytearray(max((a.offset + a.size for a in explicit), default=0))
    for argument, value in zip(explicit, values, strict=False):
        if isinstance(value, bytes):
            raw = value
        elif isinstance(value, float):
            raw = struct.pack("<f" if argument.size == 4 else "<d", value)
        else:
            raw = (value & ((1 << 8 * argument.size) - 1)).to_bytes(argument.size, "little")
        if len(raw) != argument.size:
            raise ValueError(f"{kernel.name}: argument {argument.name!r} has {argument.size} bytes")
        data[argument.offset : argument.offset + argument.size] = raw
    return bytes(data)


def _spread(seed: int) -> int:
    """Return 64 bits of which each differs between neighboring seeds; 0 of 0."""
    x = seed * 0x9E37_79B9_7F4A_7C15 & 0xFFFF_FFFF_FFFF_FFFF
    return x ^ x >> 29


def _three(values: Sequence[int]) -> tuple[int, int, int]:
    padded = (*values, 1, 1, 1)
    return int(padded[0]), int(padded[1]), int(padded[2])


def _product(values: Sequence[int]) -> int:
    return int(values[0]) * int(values[1]) * int(values[2])


def _kernarg(
    facts: Kernel, explicit: bytes, grid: Sequence[int], block: Sequence[int], dynamic_lds: int
) -> bytes:
    """Return the kernarg segment, with the hidden arguments that a HIP runtime fills in."""
    # A multiple of 64 bytes, as ROCm's pools allocate it: the compiler may load 32 bytes where only
    # 24 are left.
    data = bytearray(-(-max(facts.kernarg_bytes, len(explicit), 8) // 64) * 64)
    data[: len(explicit)] = explicit
    known = {"hidden_grid_dims": 1 + (grid[1] > 1 or block[1] > 1) + (grid[2] > 1 or block[2] > 1),
             "hidden_dynamic_lds_size": dynamic_lds}  # fmt: skip
    for number, axis in enumerate("xyz"):
        known[f"hidden_block_count_{axis}"] = grid[number]
        known[f"hidden_group_size_{axis}"] = block[number]
    for argument in facts.arguments:
        if argument.kind.startswith("hidden_"):
            value = known.get(argument.kind, 0)
            end = argument.offset + argument.size
            data[argument.offset : end] = value.to_bytes(argument.size, "little")
    return bytes(data)


def _dispatch_packet(facts: Kernel, grid: Sequence[int], block: Sequence[int], lds: int) -> bytes:
    """Return the 64-byte HSA kernel dispatch packet, for kernels that take its address."""
    items = [count * size for count, size in zip(grid, block, strict=True)]
    return struct.pack(
        "<HHHHHHIIIIIQQQQ", 2, 3, *block, 0, *items, facts.scratch_bytes, lds, 0, KERNARG_BASE, 0, 0
    )


def _error(kernel: LoadedKernel, fault: _Fault, regions: Sequence[Region]) -> EmulatorError:
    text = fault.text.decode(errors="replace")
    text = re.sub(r"region (\d+)", lambda m: f"region {regions[int(m[1])].name!r}", text)
    low, high = (int.from_bytes(kernel.image[at : at + 4].tobytes(), "little")
                 for at in (fault.pc, fault.pc + 4))  # fmt: skip
    lane = f", lane {fault.lane}" if fault.lane >= 0 else ""
    where = (
        f"  kernel {kernel.kernel.name}, pc 0x{fault.pc:x}: {text_of(low, high)}\n"
        f"  workgroup ({', '.join(map(str, fault.workgroup))}), wave {fault.wave}{lane}"
    )
    return EmulatorError(_KINDS[fault.kind], f"{text}\n{where}", fault.pc)


def _counters(
    code: Code, executed: npt.NDArray[np.uint64], totals: ctypes.Array[Totals], waves: int
) -> Counters:
    groups = dict.fromkeys(native.GROUPS, 0)
    mnemonics: dict[str, int] = {}
    by_pc: dict[int, int] = {}
    group_of = native.group_of()
    for name, count, pc in zip(code.names, executed.tolist(), code.instructions["pc"], strict=True):
        if count:
            groups[group_of[name]] += count
            mnemonics[name] = mnemonics.get(name, 0) + count
            by_pc[int(pc)] = count

    sums: dict[str, Any] = {n: sum(int(getattr(t, n)) for t in totals) for n in SUMS}
    return Counters(
        wavefronts=waves,
        instructions=groups,
        mnemonics=mnemonics,
        executed=by_pc,
        mfma_clocks={n: c * MFMA_CLOCKS[n] for n, c in mnemonics.items() if n in MFMA_CLOCKS},
        **sums,
        violations={c: sum(int(t.violations[n]) for t in totals) for n, c in enumerate(CHECKS)},
    )
