"""Conformance finds block lists that cost time without a wrong result."""

import pytest
import torch

from pyfa.backends import BACKENDS
from pyfa.backends.native import block_lists
from pyfa.blocks import Lists, kept
from pyfa.conformance import runner
from pyfa.conformance.cases import dense


@pytest.fixture(autouse=True)
def no_kept_lists():
    kept.clear()
    yield
    kept.clear()


def _partial(lists: Lists) -> Lists:
    """The same tiles, of which none is full."""
    return Lists(lists.counts, lists.entries & 0x7FFFFFFF)


def _whole(lists: Lists) -> Lists:
    """The same tiles, and what is beyond the end."""
    counts, entries = lists
    most = entries.shape[-1]
    return Lists(torch.full_like(counts, most), entries.clamp(max=most - 1))


# Sizes that no other case has: a launch is bound once for each.
@pytest.mark.parametrize(
    ("rows", "change", "status"),
    [(301, lambda lists: lists, "passed"), (302, _partial, "failed"), (303, _whole, "failed")],
)
def test_lists_that_are_not_those_of_the_mask(rows, change, status, monkeypatch):
    case = dense(rows, 420, mask_mod="causal", backward=True)
    bind = block_lists.bind
    monkeypatch.setattr(block_lists, "bind", lambda *given: _changed(bind(*given), change))
    result = runner.run_case(BACKENDS["emulator"], case, torch.device("cpu"))
    assert result.status == status
    found = [message.startswith("block lists: not those") for message in result.messages]
    assert any(found) == (status == "failed")


def _changed(launch, change):
    return lambda *given: change(launch(*given))
