"""vLLM's models on pyfa: an attention backend that vLLM finds as a plug-in.

    vllm serve MODEL --attention-backend CUSTOM     # on a GPU
    PYFA_VLLM_CPU=1 vllm serve MODEL                # on a CPU

vLLM calls ``register`` through the entry point ``vllm.general_plugins``, in each of its processes.
``register`` only tells vLLM the name of the class in ``backend.py``, which vLLM loads if the user
selects it.
"""

from __future__ import annotations

import importlib
import logging
import re

from ... import env

__all__ = ["BACKEND", "check_version", "register"]

BACKEND = f"{__name__}.backend.PyfaBackend"
# The interface that backend.py is written for; ci/consumers runs 0.32.0.
OLDEST, NEWER = (0, 32), (0, 33)

_log = logging.getLogger("pyfa")


def check_version(version: str) -> None:
    """Raise ``ImportError`` unless vLLM ``version`` has the interface that ``backend.py`` uses."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) < NEWER:
        oldest, newer = (".".join(map(str, each)) for each in (OLDEST, NEWER))
        raise ImportError(
            f"vllm: expected version {oldest} or newer, and older than {newer}; got {version}. "
            "Its attention interface changes between versions"
        )


def register() -> None:
    """Register pyfa's attention backend with vLLM as ``CUSTOM``, which ``--attention-backend
    CUSTOM`` selects. With ``PYFA_VLLM_CPU=1``, ``register`` also replaces ``CPU_ATTN``.

    May be called more than once. If another plug-in has registered ``CUSTOM``, that registration
    stays. If vLLM has no such registry, ``register`` does nothing. With ``PYFA_VLLM_CPU=1``,
    ``register`` raises an error instead, and also raises ``ImportError`` for an unsupported
    version of vLLM.
    """
    asked = env.get("PYFA_VLLM_CPU")
    if asked:
        check_version(importlib.import_module("vllm").__version__)
    try:
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
        names, add = registry.AttentionBackendEnum, registry.register_backend
        taken = names.CUSTOM.is_overridden() and names.CUSTOM.get_path() != BACKEND
    except (ImportError, AttributeError):  # vLLM calls plug-ins unguarded: an error would end it
        if asked:
            raise
        return
    if taken:
        _log.info("vLLM's backend CUSTOM is %s, not pyfa's", names.CUSTOM.get_path())
    else:
        add(names.CUSTOM, BACKEND)
    if asked:
        add(names.CPU_ATTN, BACKEND)
