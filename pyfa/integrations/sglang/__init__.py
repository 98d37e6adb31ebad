"""SGLang's models on pyfa: an attention backend that SGLang finds as a plug-in.

    sglang serve MODEL --attention-backend pyfa --page-size 64

SGLang calls ``register`` through the entry point ``sglang.srt.plugins``, in each of its processes.
``register`` only adds a name, so nothing else happens until the user selects it.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

__all__ = ["NAME", "check_version", "register"]

NAME = "pyfa"
# The interface that backend.py is written for; ci/consumers runs 0.5.23.
OLDEST, NEWER = (0, 5, 23), (0, 6, 0)


def check_version(version: str) -> None:
    """Raise ``ImportError`` unless SGLang ``version`` has the interface that ``backend.py``
    uses."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= tuple(map(int, found.groups())) < NEWER:
        oldest, newer = (".".join(map(str, each)) for each in (OLDEST, NEWER))
        raise ImportError(
            f"sglang: expected version {oldest} or newer, and older than {newer}; got {version}. "
            "Its attention interface changes between versions"
        )


def register() -> None:
    """Add ``pyfa`` to SGLang's attention backends, and to those allowed with
    ``--enable-deterministic-inference``.

    May be called more than once. If another plug-in has registered the name, that registration
    stays.
    """
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    if NAME in registry.ATTENTION_BACKENDS:
        return
    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    choices.add_attention_backend_choices([NAME])
    choices.add_deterministic_attention_backend_choices([NAME])
    choices.add_radix_supported_deterministic_attention_backend_choices([NAME])
    registry.register_attention_backend(NAME)(_made)


def _made(runner: Any) -> Any:
    """Return the backend for a model. SGLang calls it if it is to use pyfa; an unsupported version
    is refused here."""
    check_version(importlib.import_module("sglang").__version__)
    return importlib.import_module(f"{__name__}.backend").PyfaBackend(runner)
