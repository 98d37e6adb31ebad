"""Latent attention of many rows over long caches, which the emulator takes too long for."""

from __future__ import annotations

from typing import Any

import pytest

from pyfa.backends import BACKENDS
from pyfa.conformance import runner
from pyfa.conformance.cases import packed
from pyfa.conformance.report import PASSED

_DIMS: dict[str, Any] = {"head_dim": 576, "head_dim_v": 512, "heads_k": 1, "scale": 192**-0.5}
_LENGTHS = (
    ((1, 1, 1, 1, 1), (0, 1, 63, 64, 65)),
    ((1, 1, 1), (8192, 127, 1000)),
    ((2, 2), (129, 4000)),
    ((4, 4, 4), (2, 700, 8192)),
)
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"heads_q": 128},
    {"heads_q": 64, "causal": True, "page_size": 64, "sinks": True},
    {"heads_q": 33, "causal": True, "page_size": 16, "slack": 5, "recipe": "growing"},
    {"heads_q": 17, "causal": True, "page_size": 256, "num_splits": 3, "recipe": "growing"},
    {"heads_q": 100, "sinks": True, "slack": 70, "num_splits": 2, "dtype": "float16"},
    {"heads_q": 128, "head_dim": 320, "head_dim_v": 256, "page_size": 8, "recipe": "huge"},
)


@pytest.mark.parametrize("lengths", _LENGTHS, ids=str)
@pytest.mark.parametrize("options", _OPTIONS, ids=str)
def test_many_rows_over_long_caches(
    backend: str, lengths: tuple[tuple[int, ...], tuple[int, ...]], options: dict[str, Any]
) -> None:
    if "latent" not in BACKENDS[backend].FEATURES:
        pytest.skip(f"{backend} has no latent attention")
    case = packed(lengths, "latent", **{"dtype": "bfloat16", **_DIMS, **options})
    result = runner.run_case(BACKENDS[backend], case, runner.device_of(backend))
    assert result.status == PASSED, (result.messages, result.reasons)
