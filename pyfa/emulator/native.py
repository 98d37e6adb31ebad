"""Builds and loads the C core: compiled once by ziglang's clang or the system's cc, then cached."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import itertools
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from pyfa import cache
from pyfa.errors import CompileError

SOURCES = Path(__file__).parent / "core"
# Contraction would fuse what the ISA keeps apart; errno and traps of the C library mean nothing to
# a kernel and would keep loops from being vectorized.
FLAGS = (
    "-O3", "-shared", "-fPIC", "-std=gnu11", "-fvisibility=hidden", "-ffp-contract=off",
    "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-g0",
)  # fmt: skip
# x86-64-v3 is AVX2 and FMA: without FMA each fused multiply-add of MFMA is a call into libm.
V3_FEATURES = frozenset(("avx2", "fma", "bmi2", "f16c"))

_loads = itertools.count(1)


class CoreMissing(RuntimeError):
    """The emulator's C core cannot be built here: the message says what is missing."""


def compiler() -> tuple[tuple[str, ...], str]:
    """Return the C compiler's command, and its name with version. Raises ``CoreMissing`` without
    one."""
    found = importlib.util.find_spec("ziglang")
    if found is not None and found.origin is not None:
        zig = Path(found.origin).parent / "zig"
        # Without zig's own runtime library, which takes as long to compile as the core and of which
        # the core needs nothing; should it ever, the linker says so.
        command = (str(zig), "cc", "-fno-sanitize=all", "-rtlib=none", "-Wl,-z,defs")
        return command, f"zig {importlib.metadata.version('ziglang')}"
    system = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if system is None:
        raise CoreMissing(
            "no C compiler: pip install 'pyfa-attention[compile]' (ziglang), or install cc"
        )
    told = subprocess.run([system, "--version"], capture_output=True, text=True, check=True).stdout
    return (system,), told.splitlines()[0]


def why_unavailable() -> str | None:
    """Return why the emulator cannot run on this machine, or None if it can."""
    try:
        compiler()
    except CoreMissing as missing:
        return str(missing)
    for package in ("elftools", "msgpack"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed (pip install 'pyfa-attention[emulator]')"
    return None


def _target() -> tuple[str, ...]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ()
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return ("-march=x86-64-v3",) if set(flags.split()) >= V3_FEATURES else ()


def _build(command: tuple[str, ...], flags: tuple[str, ...]) -> bytes:
    # zig spells the level with underscores where it does not pass -march through.
    spelled = tuple(f.replace("x86-64-v3", "x86_64_v3") if "cc" in command else f for f in flags)
    with tempfile.TemporaryDirectory(prefix="pyfa-emulator-") as folder:
        library = Path(folder, "core.so")
        sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
        # zig keeps what it builds of the C library in the user's folder, and fails without one.
        private = {"ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}
        done = subprocess.run(
            [*command, *spelled, *sources, "-o", str(library), "-lm"],
            capture_output=True, text=True, check=False, env={**os.environ, **private},
        )  # fmt: skip
        if done.returncode:
            raise CompileError("the emulator's core does not compile", done.stderr, str(SOURCES))
        return library.read_bytes()


def _loaded(code: bytes) -> ctypes.CDLL:
    """Load the library from these verified bytes, because the file may have changed since."""
    if hasattr(os, "memfd_create"):
        with suppress(OSError), open(os.memfd_create("pyfa-emulator"), "wb") as file:
            file.write(code)
            file.flush()
            # A name that no library had: of one that it knows, the loader opens nothing and gives
            # what had the name, and numbers of files are used again.
            return ctypes.CDLL(f"/proc/self/{'./' * next(_loads)}fd/{file.fileno()}")
    # The loader needs a file, which may be removed once it is mapped.
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(code)
        file.flush()
        return ctypes.CDLL(file.name)


@functools.cache
def load() -> ctypes.CDLL:
    """Compile the emulator's C core if needed, and load it with ctypes; calls release the GIL."""
    command, name = compiler()
    flags = FLAGS + _target()
    source = "".join(
        f"// {path.name}\n{path.read_text(encoding='utf-8')}" for path in sorted(SOURCES.iterdir())
    )
    entry = cache.get_or_build(
        "emulator",
        cache.key(source, flags, name, "host"),
        suffix=".so",
        source=source,
        meta={"compiler": name, "arch": "host", "options": " ".join(flags)},
        build=lambda: _build(command, flags),
    )
    library = _loaded(entry.code)
    library.emulator_op_name.restype = ctypes.c_char_p
    library.emulator_shadow_new.restype = ctypes.c_void_p
    library.emulator_ops()
    return library


@functools.cache
def operations() -> dict[str, int]:
    """Return the mnemonics that the core implements, with their numbers."""
    library = load()
    names = (library.emulator_op_name(number) for number in range(library.emulator_ops()))
    return {name.decode(): number for number, name in enumerate(names)}


GROUPS = ("salu", "valu", "trans", "mfma", "lds", "vmem", "smem", "branch", "barrier", "waitcnt")


@functools.cache
def group_of() -> dict[str, str]:
    """Return the class of each mnemonic for counting, one of ``GROUPS``."""
    library = load()
    return {
        name: GROUPS[library.emulator_op_group(number)] for name, number in operations().items()
    }
