"""Launch random problems under random delays, and compare each with another backend.

``python benchmarks/random_launches.py [--launches 10000] [--each 25] [--jobs 16] [--seed 0]
[--save]``. A case is drawn from the seed: shapes, heads, masks, packing, layouts, caches. Its
inputs lie in guard zones of NaN. ``--backend`` (cuda) and ``--against`` (triton) run it once at
rest: both are held to float64 by the rule of ``pyfa conformance``, and to each other by the sum of
what it allows the two. Then the backend runs it ``--each`` times, on three streams, behind kernels
that wait for random times and beside others that want the same SMs, in memory that holds NaN. What
has the same bits in every run by contract (out, LSE, dK, dV; dQ where ``deterministic``; caches)
must have those of the run at rest, and dQ stay within the sum of the two bounds.

Processes share the GPU, and take cases of one kind as long as there are any: Triton compiles anew
for each kind. One whose launches take ``--stuck`` seconds is killed and its case reported. The
status is 1 for any difference, a case that hung, crashed or did not run within ``--limit`` seconds,
or one that other kernels took than its kind says. ``--plant difference`` or ``stuck`` is a fault in
the first case that must be found. ``--save`` writes ``results/random_launches_<backend>_<arch>``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import math
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import machine
import torch
from disturbance import disturbance
from random_cases import IN_TURN, drawn, kernels_of, on_device, unexpected

from pyfa import api, device, reference
from pyfa.backends import BACKENDS
from pyfa.conformance import build, examine, runner
from pyfa.conformance.cases import Case
from pyfa.conformance.inputs import Inputs
from pyfa.conformance.tolerances import Check

_FUNCTIONS = {
    "dense": api.attention,
    "varlen": api.attention_varlen,
    "kvcache": api.attention_kvcache,
}
_CACHES = ("k_cache", "v_cache")
_REFERENCE = "reference"
_WORST = 10
_TELL_SECONDS = 10.0
# Queued before the host waits for them, so that one that hangs is told from the next.
_AT_ONCE = 5
# What a process says of its launches, and how much longer it may be silent where it may compile.
_LAUNCH, _TO_COMPILE = "launch", 4


def launch(
    inputs: Inputs, backend: str, grad: bool, pause: Callable[[], None] = lambda: None
) -> dict[str, torch.Tensor]:
    """What a call gives, by the names of conformance; ``pause`` comes before its backward."""
    case = inputs.case
    buffers = {
        name: item.buffer.clone() if case.new_keys and name in _CACHES else item.buffer
        for name, item in inputs.placed.items()
    }
    tensors = {name: item.view(buffers[name]) for name, item in inputs.placed.items()}
    wanted = ("q", "k", "v", *(["sinks"] if case.sinks else [])) if grad else ()
    leaves = {name: tensors[name].requires_grad_() for name in wanted}
    return_lse = bool(case.dlse) or not grad
    function: Any = _FUNCTIONS[case.kind]
    with torch.set_grad_enabled(grad):
        result = function(**tensors, **inputs.others, return_lse=return_lse, backend=backend)
    out, lse = result if return_lse else (result, None)
    results = {"inference_out" if case.backward and not grad else "out": out}
    if lse is not None:
        results["lse"] = lse
    if grad:
        pause()
        results |= examine._gradients(inputs, out.device, out, lse, leaves)
    elif case.new_keys:
        results |= {name: buffers[name] for name in _CACHES}
    return {name: x.detach() for name, x in results.items()}


def at_rest(inputs: Inputs, backend: str) -> dict[str, torch.Tensor]:
    """Everything that launches of a case can give. Training has an LSE where its gradient flows."""
    case = inputs.case
    results = launch(inputs, backend, case.backward)
    return results | launch(inputs, backend, False) if _infers_too(case) else results


def _infers_too(case: Case) -> bool:
    return case.backward and not case.dlse


def _exact(case: Case, name: str) -> bool:
    """Whether an output has the same bits in every run."""
    return name != "dsinks" and (name != "dq" or case.deterministic)


@dataclass
class Found:
    """What came of a case."""

    index: int
    kind: str
    case: str
    features: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    launches: int = 0
    bits: int = 0
    failures: tuple[str, ...] = ()
    ratios: tuple[tuple[float, str], ...] = ()
    differences: tuple[tuple[float, str], ...] = ()
    compiled: tuple[str, ...] = ()


def judged(
    expected: examine.Expected, results: dict[str, torch.Tensor], whose: str
) -> tuple[dict[str, Check], list[str]]:
    """The rule's checks of ``results`` by name, and what failed."""
    results = {name: x for name, x in results.items() if name not in _CACHES}
    found = examine.Findings()
    examine._compare(found, expected, expected.ref, results)
    examine.check_zeros(found, expected.inputs.case, results, expected.ref)
    failures = [f"{whose}: {check.message}" for check in found.checks if check.message]
    return {check.name: check for check in found.checks}, failures


def apart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The largest and the mean distance; equal infinities have none."""
    x, y = x.float(), y.float()
    distance = torch.where(x == y, 0.0, (x - y).abs())
    return torch.stack((distance.max(), distance.mean()))


def bits_apart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """In how many bytes they differ."""
    x, y = (z.contiguous().flatten().view(torch.uint8) for z in (x, y))
    count = (x != y).sum(dtype=torch.float32)
    return torch.stack((count, torch.zeros_like(count)))


def examined(
    index: int, options: argparse.Namespace, tell: Callable[[str], None] = lambda said: None
) -> Found:
    """Everything of case ``index``; ``tell`` is called while it goes on."""
    kind, case = drawn(index, options)
    assert not case.flaws(), (case, case.flaws())
    where = runner.device_of(options.backend)
    features = (*sorted(case.features), f"D={case.head_dim}", case.layout, case.kind)
    found = Found(index, kind.name, case.name, features)
    inputs = on_device(build.build(case), where)
    before = {name: x.buffer.clone() for name, x in inputs.placed.items()}
    expected = examine.Expected(inputs)
    found.kernels = tuple(kernels_of(case, inputs, options.backend, where))
    wrong = unexpected(kind, list(found.kernels), options.backend, where)
    failures = [wrong] if wrong else []
    with torch.device(where):  # the reference makes its masks wherever torch makes tensors
        expected.ref, expected.naive, expected.recomputed  # noqa: B018
    tell(options.backend)
    mine = at_rest(inputs, options.backend)
    checks, failed = judged(expected, mine, options.backend)
    failures += failed
    tell(options.against)
    if options.against == _REFERENCE:
        theirs = {name: expected.ref[name.removeprefix("inference_")].to(x.dtype)
                  for name, x in mine.items() if name not in _CACHES}  # fmt: skip
    else:
        theirs = at_rest(inputs, options.against)
        failures += judged(expected, theirs, options.against)[1]
    if case.new_keys:
        mine |= inputs.cache_after  # what an append must leave, byte for byte
    # Both have the same bounds: those of the case.
    allowed = {name: (2.0 * check.max_bound, 2.0 * check.mean_bound)
               for name, check in checks.items()}  # fmt: skip
    names = [name for name in mine if name not in _CACHES]
    distances = dict(zip(names, (apart(mine[n], theirs[n]).tolist() for n in names), strict=True))
    said, differences = beyond(distances, allowed)
    failures += [f"at rest: {each}" for each in said]
    found.ratios = tuple((check.ratio, name) for name, check in checks.items())

    disturbed = disturbance(where)
    disturbed.random.seed(case.name)
    disturbed.wait()  # other streams read all of it
    tell(f"{_LAUNCH} at rest")
    measured = []
    for number in range(options.each):
        planted = options.plant if (index, number) == (0, options.each // 2) else ""
        with disturbed.around():
            grad = case.backward and not (_infers_too(case) and number % 4 == 3)
            results = launch(inputs, options.backend, grad, disturbed.pause)
            if planted == "difference":
                bits = results["out"].view(torch.int16)
                bits[(-1,) * bits.dim()] ^= 1
            measured.append({
                name: bits_apart(x, mine[name]) if _exact(case, name) else apart(x, theirs[name])
                for name, x in results.items()
            })  # fmt: skip
            del results  # the next launch's NaN go where they were
        if planted == "stuck":
            time.sleep(1e6)
        if (number + 1) % _AT_ONCE == 0:
            disturbed.wait()
            tell(f"{_LAUNCH} {number}")
    disturbed.wait()
    for number, one in enumerate(measured):
        values = dict(zip(one, torch.stack(list(one.values())).tolist(), strict=True))
        differing = {name: pair[0] for name, pair in values.items() if _exact(case, name)}
        found.bits += len(differing)
        failures += [f"launch {number}: {name} differs from that at rest in {count:.0f} bytes"
                     for name, count in differing.items() if count != 0.0]  # fmt: skip
        said, more = beyond({n: x for n, x in values.items() if n not in differing}, allowed)
        failures += [f"launch {number}: {each}" for each in said]
        differences = {n: max(share, differences.get(n, 0.0)) for n, share in more.items()} | {
            n: share for n, share in differences.items() if n not in more
        }
    changed = [name for name, x in inputs.placed.items() if not torch.equal(x.buffer, before[name])]
    failures += [f"inputs or what lies around them changed: {', '.join(changed)}"] * bool(changed)
    found.launches, found.failures = options.each, tuple(failures)
    found.differences = tuple((share, name) for name, share in differences.items())
    digests: Any = getattr(BACKENDS[options.backend], "kernel_digests", dict)
    found.compiled = tuple(digests())
    return found


def beyond(
    distances: dict[str, list[float]], allowed: dict[str, tuple[float, float]]
) -> tuple[list[str], dict[str, float]]:
    """What is further from the other backend's than allowed, and each one's share of that."""
    failures, shares = [], {}
    for name, (largest, mean) in distances.items():
        most, most_mean = allowed[name]
        # Negated, so that a NaN fails.
        if not (largest <= most and mean <= most_mean):
            failures.append(f"{name} is {largest:.3e} (mean {mean:.3e}) from the other backend's, "
                            f"allowed {most:.3e} ({most_mean:.3e})")  # fmt: skip
        shares[name] = max(
            x / y if y else math.inf if x else 0.0 for x, y in ((largest, most), (mean, most_mean))
        )
    return failures, shares


def work(pipe: connection.Connection, options: argparse.Namespace) -> None:
    """A process: cases by their index until there are no more, or one raises."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    # The reference draws dropout with numpy.
    where, keep_mask = runner.device_of(options.backend), reference.keep_mask
    reference.keep_mask = lambda *given: keep_mask(*given).to(where)
    while (index := pipe.recv()) is not None:
        try:
            found = examined(index, options, pipe.send)
        except Exception:
            kind, case = drawn(index, options)
            found = Found(index, kind.name, case.name, failures=(traceback.format_exc(),))
        pipe.send(found)
        if not found.launches:
            return  # an error of the device would be that of all later cases


class Worker:
    """A process and the case that it has."""

    def __init__(self, options: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, options), daemon=True)
        self.process.start()
        theirs.close()
        self.index, self.kind = -1, ""
        self.heard("its start")

    def heard(self, said: str) -> None:
        self.at, self.since = said, time.monotonic()

    def give(self, index: int | None) -> None:
        self.index = -1 if index is None else index
        self.heard("its start")
        with contextlib.suppress(BrokenPipeError):  # its end is heard when it is listened to
            self.pipe.send(index)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Schedule:
    """Cases that nobody has taken yet, by kind."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.left: dict[str, collections.deque[int]] = {}
        for index in range(-(-options.launches // options.each)):
            kind = IN_TURN[index % len(IN_TURN)].name
            self.left.setdefault(kind, collections.deque()).append(index)

    def next(self, worker: Worker, workers: list[Worker]) -> int | None:
        """A case of the kind that ``worker`` has compiled, else of one that few others work at."""
        kinds = [kind for kind, indices in self.left.items() if indices]
        if not kinds:
            return None
        if worker.kind not in kinds:
            busy = collections.Counter(other.kind for other in workers if other is not worker)
            worker.kind = max(kinds, key=lambda kind: len(self.left[kind]) / (1 + 4 * busy[kind]))
        return self.left[worker.kind].popleft()


def run(options: argparse.Namespace) -> list[Found]:
    """What came of every case that began within the limit."""
    begin = told = time.monotonic()
    schedule, all_found, lost = Schedule(options), list[Found](), 0
    count = -(-options.launches // options.each)
    workers = [Worker(options) for _ in range(min(options.jobs, count))]

    def take(worker: Worker) -> None:
        over = time.monotonic() - begin > options.limit
        index = None if over else schedule.next(worker, workers)
        worker.give(index)
        if index is None:
            workers.remove(worker)

    def lose(worker: Worker, why: str) -> None:
        kind, case = drawn(worker.index, options)
        replaced(worker, Found(worker.index, kind.name, case.name, failures=(why,)))

    def replaced(worker: Worker, found: Found) -> None:
        nonlocal lost
        all_found.append(found)
        workers.remove(worker)
        worker.end()
        lost += 1
        if lost <= options.jobs and any(schedule.left.values()):
            workers.append(Worker(options))
            take(workers[-1])

    for worker in list(workers):
        take(worker)
    while workers:
        heard = connection.wait([worker.pipe for worker in workers], timeout=0.5)
        for worker in [worker for worker in workers if worker.pipe in heard]:
            try:
                said: str | Found = worker.pipe.recv()
            except (EOFError, ConnectionResetError):
                worker.process.join(5.0)
                status = worker.process.exitcode
                lose(worker, f"the process ended, status {status}, after: {worker.at}")
                continue
            if isinstance(said, str):
                worker.heard(said)
            elif said.launches:
                all_found.append(said)
                take(worker)
            else:
                replaced(worker, said)
        for worker in list(workers):
            patience = options.stuck * (1 if worker.at.startswith(_LAUNCH) else _TO_COMPILE)
            if time.monotonic() - worker.since > patience:
                lose(worker, f"stuck: nothing for {patience:.0f} s after: {worker.at}")
        if time.monotonic() > told + _TELL_SECONDS:
            told = time.monotonic()
            launches = sum(found.launches for found in all_found)
            print(f"{told - begin:4.0f} s {launches} launches", file=sys.stderr)
    return sorted(all_found, key=lambda found: found.index)


def summary(all_found: list[Found], options: argparse.Namespace) -> dict[str, Any]:
    """Counts, the worst ratios, the kernels that ran, and what failed."""
    where = runner.device_of(options.backend)
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for found in all_found:
        for name, keys in (("feature", found.features), ("kernel", found.kernels),
                           ("kind", (found.kind,))):  # fmt: skip
            counts[name].update(dict.fromkeys(keys, found.launches))

    def worst(name: str) -> list[list[Any]]:
        rows = [(round(ratio, 3), found.case, of)
                for found in all_found for ratio, of in getattr(found, name)]  # fmt: skip
        return [list(row) for row in sorted(rows, reverse=True)[:_WORST]]

    return {
        "what": "cases at rest against float64 (ratios) and another backend (differences, as a "
        "share of what the rule allows both), then launches of each under random delays",
        "backend": options.backend,
        "against": options.against,
        "arch": device.of(where).arch,
        "seed": options.seed,
        "wanted": options.launches,
        "launches": sum(found.launches for found in all_found),
        "cases": len(all_found),
        "each": options.each,
        "jobs": options.jobs,
        "outputs_compared_by_bits": sum(found.bits for found in all_found),
        "worst_ratios": worst("ratios"),
        "worst_differences": worst("differences"),
        "launches_by": {name: dict(sorted(each.items())) for name, each in counts.items()},
        "kernels": sorted({kernel for found in all_found for kernel in found.compiled}),
        "failed": {found.case: list(found.failures[:_WORST])
                   for found in all_found if found.failures},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--against", default="triton", help="a backend, or 'reference': float64")
    parser.add_argument("--launches", type=int, default=10_000)
    parser.add_argument("--each", type=int, default=25, help="launches of a case")
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--longest", type=int, default=1500, help="rows or keys of a sequence")
    parser.add_argument("--scores", type=float, default=6e6, help="of all heads of a case")
    parser.add_argument(
        "--stuck",
        type=float,
        default=30.0,
        help="seconds that a few launches may take; four times as many, compiling",
    )
    parser.add_argument("--limit", type=float, default=600.0, help="seconds, then no case begins")
    parser.add_argument("--plant", choices=("difference", "stuck"), default="")
    parser.add_argument("--list", action="store_true", help="only print the cases")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.list:
        for index in range(-(-options.launches // options.each)):
            kind, case = drawn(index, options)
            print(f"{kind.name}: {case.name}")
        return 0
    begin = time.monotonic()
    found = summary(run(options), options)
    found["seconds"] = round(time.monotonic() - begin)
    for key, value in found.items():
        if key == "failed":
            for name, messages in value.items():
                print(f"failed {name}\n    " + "\n    ".join(x.strip()[-400:] for x in messages))
        elif key == "kernels":
            print(f"kernels: {len(value)}")
        else:
            print(f"{key}: {value}")
    if options.save:
        print(machine.save(f"random_launches_{options.backend}_{found['arch']}", found))
    return int(bool(found["failed"]) or found["launches"] < options.launches)


if __name__ == "__main__":
    sys.exit(main())
