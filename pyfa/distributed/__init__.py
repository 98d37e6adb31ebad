"""Attention over sequences that do not fit on one device, with torch.distributed."""

from ..errors import RankError
from .api import ring_attention, ulysses_attention
from .shards import local_positions, shard, unshard

__all__ = [
    "RankError",
    "local_positions",
    "ring_attention",
    "shard",
    "ulysses_attention",
    "unshard",
]
