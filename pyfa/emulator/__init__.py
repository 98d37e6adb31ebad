"""Runs gfx942 (MI300X) code objects on the CPU, instruction by instruction, and checks them.

    machine = Machine(threads=2)
    kernel = machine.load(hsaco).kernel("attn_fwd")
    machine.map(q.data_ptr(), q.nbytes, "q")
    counters = machine.launch(kernel, grid=(8, 1, 1), block=(256, 1, 1), kernarg=params)

One workgroup runs at a time (on each host thread), in an order drawn from the machine's seed; what
several workgroups do to one address is found by tags (core/races.c), and atomics without a return
value reach memory late and in any order that the ISA allows (core/pending.c).

Functionally emulated: nothing here was compared with silicon. Not modelled: time and caches (of
which ``timing`` has a model, over traces of what ran: ``Machine.launch(trace=...)``), the order of
rounding inside MFMA and the last bit of v_exp, v_log, v_rcp, v_rsq and v_sqrt. Wait states are not
executed but checked, in code that is not run: ``hazards``.
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
