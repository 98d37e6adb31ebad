"""Runs gfx942 (MI300X) code objects on the CPU, instruction by instruction, and checks them.

    machine = Machine(threads=2)
    kernel = machine.load(hsaco).kernel("attn_fwd")
    machine.map(q.data_ptr(), q.nbytes, "q")
    counters = machine.launch(kernel, grid=(8, 1, 1), block=(256, 1, 1), kernarg=params)

Each host thread runs one workgroup at a time, in an order drawn from the machine's seed.
Conflicting accesses of several workgroups to one address are found by tags (core/races.c). Atomics
without a return value reach memory late, in any order that the ISA allows (core/pending.c).

The emulation is functional and was not compared with hardware. Time and caches are not modeled. AMD
does not publish the order of rounding inside MFMA and the last bit of v_exp, v_log, v_rcp, v_rsq
and v_sqrt. ``Machine(rounding=SEED)`` varies both, which shows whether results depend on them.
(``timing`` models time from traces: ``Machine.launch(trace=...)``.) Wait states are not executed;
``hazards`` checks them in the code object.
"""

from pyfa.emulator.counters import Counters
from pyfa.emulator.coverage import Coverage, Covered
from pyfa.emulator.machine import (
    Checks,
    EmulatorError,
    LoadedKernel,
    Machine,
    Program,
    load,
    pack_arguments,
    prepare,
)

__all__ = [
    "Checks",
    "Counters",
    "Coverage",
    "Covered",
    "EmulatorError",
    "LoadedKernel",
    "Machine",
    "Program",
    "load",
    "pack_arguments",
    "prepare",
]
