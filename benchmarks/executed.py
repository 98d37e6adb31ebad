"""Record which instructions the cases execute, and their share of the shipped code."""

from __future__ import annotations

import collections
import hashlib
import lzma
import pickle
from pathlib import Path
from typing import Any, NamedTuple

from pyfa.backends.hip import code, runtime_emulator
from pyfa.conformance.cases import Case
from pyfa.emulator import Coverage, Covered
from pyfa.plan import Plan

ARCH = "gfx942"


class Ran(NamedTuple):
    """A case without a fault: its seconds, and what it executed of each code object."""

    case: Case
    status: str
    seconds: float
    executed: dict[str, tuple[str, list[int]]]
    objects: dict[str, bytes]


def static_of(plan: Plan) -> tuple[str, Covered]:
    """The digest of a plan's code object and how many instructions it has."""
    found = code.load(plan, ARCH)
    kernel = runtime_emulator.program(found.data).kernel(found.kernel.name)
    return found.digest, Covered(found.kernel.name, len(kernel.code.names))


def write(path: Path, ran: list[Ran]) -> None:
    """What ran, without the code objects; as plain tuples, since this class may be a script's."""
    path.write_bytes(lzma.compress(pickle.dumps([tuple(one._replace(objects={})) for one in ran])))


def read(path: Path) -> list[Ran]:
    return [Ran(*row) for row in pickle.loads(lzma.decompress(path.read_bytes()))]


def addresses(ran: list[Ran]) -> dict[str, set[int]]:
    """By digest of a code object: the addresses that were executed."""
    found: dict[str, set[int]] = collections.defaultdict(set)
    for one in ran:
        for digest, (_, places) in one.executed.items():
            found[digest].update(places)
    return found


def code_of(shipped: dict[str, Covered]) -> dict[str, str]:
    """By kernel: a digest of its code objects that ship, for results that hold for these alone."""
    kernels = sorted({each.kernel for each in shipped.values()})
    return {
        kernel: hashlib.sha256(
            "".join(sorted(d for d, each in shipped.items() if each.kernel == kernel)).encode()
        ).hexdigest()[:12]
        for kernel in kernels
    }


def coverage(ran: list[Ran], shipped: dict[str, Covered]) -> list[dict[str, Any]]:
    """By kernel: code objects that ship and instructions in them, and how many were executed."""
    total, every = Coverage(), Coverage()
    every.add(shipped)
    for one in ran:
        total.add({
            digest: Covered(kernel, shipped[digest].static, set(addresses))
            for digest, (kernel, addresses) in one.executed.items() if digest in shipped
        })  # fmt: skip
    ran_of, rows = total.by_kernel(), []
    for kernel, (objects, static, _) in every.by_kernel().items():
        objects_ran, _, executed = ran_of.get(kernel, (0, 0, 0))
        rows.append({
            "kernel": kernel, "objects": objects, "ran": objects_ran, "instructions": static,
            "executed": executed, "share": round(executed / static, 4),
        })  # fmt: skip
    sums = {name: sum(row[name] for row in rows)
            for name in ("objects", "ran", "instructions", "executed")}  # fmt: skip
    return [
        *rows,
        {"kernel": "all", **sums, "share": round(sums["executed"] / sums["instructions"], 4)},
    ]
