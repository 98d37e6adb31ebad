"""Call Nsight Compute, and read its CSV."""

from __future__ import annotations

import csv
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence

# DRAM traffic; sectors of 32 bytes that pass the L2's tag stage, of all clients and of the SMs.
METRICS = (
    "dram__bytes.sum", "dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_sectors.sum",
    "lts__t_sectors_srcunit_tex.sum",
)  # fmt: skip
SECTOR_BYTES = 32
_COUNTS = ("byte", "sector", "")  # units of METRICS


def why_unavailable() -> str | None:
    return None if shutil.which("ncu") else "ncu (Nsight Compute) is not on the PATH"


def command(program: Sequence[str], metrics: Sequence[str] = METRICS) -> list[str]:
    """Profiles what ``program`` runs between cudaProfilerStart and cudaProfilerStop.

    Caches are left as the kernel before leaves them, clocks as they are: what counts are bytes of
    kernels one behind the other.
    """
    return [
        "ncu", "--csv", "--print-units", "base", "--profile-from-start", "off",
        "--cache-control", "none", "--clock-control", "none", "--metrics", ",".join(metrics),
        "--target-processes", "all", *program,
    ]  # fmt: skip


def parse(text: str, units: Sequence[str] = _COUNTS) -> list[dict[str, object]]:
    """A row a kernel, in the order of launch: its ``kernel`` name, and a number for each metric, in
    one of ``units`` (any if empty).

    ncu prints a line a metric under a header that begins with "ID", after its own messages and
    what the program printed. ``ValueError`` where there is no such header, with what came instead.
    """
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        tail = " | ".join(line for line in lines[-3:] if line)
        raise ValueError(f"ncu printed no table: {tail or 'nothing'}")
    kernels: dict[str, dict[str, object]] = defaultdict(dict)
    table = [line for line in lines[start:] if line.startswith('"')]
    for row in csv.DictReader(table):
        one = kernels[row["ID"]]
        one["kernel"] = row["Kernel Name"]
        value = row["Metric Value"].replace(",", "")
        if value in ("", "n/a"):
            raise ValueError(f"ncu has no {row['Metric Name']} on this GPU")
        unit = row["Metric Unit"]
        if units and unit not in units:
            raise ValueError(f"expected bytes and sectors of {row['Metric Name']}; got {unit}")
        one[row["Metric Name"]] = float(value)
    return list(kernels.values())


def totals(kernels: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """Sums over kernels: DRAM bytes, and bytes of the sectors that SMs asked the L2 for."""

    def total(metric: str) -> float:
        return sum(float(str(one[metric])) for one in kernels)

    return {
        "dram_bytes": total("dram__bytes.sum"),
        "dram_read_bytes": total("dram__bytes_read.sum"),
        "dram_write_bytes": total("dram__bytes_write.sum"),
        "l2_bytes": total("lts__t_sectors_srcunit_tex.sum") * SECTOR_BYTES,
        "l2_all_bytes": total("lts__t_sectors.sum") * SECTOR_BYTES,
    }
