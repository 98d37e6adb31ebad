"""``Shape``: the sizes and the mask of one dense attention."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """A dense attention without score terms. Window bounds are those of ``Call``: −1 means
    unlimited.

    Masks align to the bottom right: query i sees key j where −left ≤ j − i − shift ≤ right. Chunks
    (``attention_chunk``) are ignored, so kernels with chunks read less than is computed here.
    ``itemsize`` is the size of an element of q, k and v in bytes. With ``latent``, v is a view of
    k.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    window_left: int = -1
    window_right: int = -1
    itemsize: int = 2
    latent: bool = False
    window_shift: int = 0

    @property
    def shift(self) -> int:
        """Return the key in the middle of query 0's window."""
        return self.seqlen_k - self.seqlen_q + self.window_shift

    @property
    def group(self) -> int:
        """Return the number of query heads that share a KV head."""
        return self.heads_q // max(1, self.heads_k)

    @property
    def batch_heads(self) -> int:
        """Return the number of (sequence, query head) pairs: attentions with one head each."""
        return self.batch * self.heads_q

    @property
    def mirrored(self) -> Shape:
        """Return the shape with keys and queries exchanged, to ask which queries see a key."""
        return self._replace(
            seqlen_q=self.seqlen_k,
            seqlen_k=self.seqlen_q,
            window_left=self.window_right,
            window_right=self.window_left,
            window_shift=-self.window_shift,
        )

    def keys_seen(self, first: int, last: int) -> tuple[int, int]:
        """Return the range [begin, end) of keys that at least one of the queries ``first`` …
        ``last`` sees."""
        most = self.seqlen_k
        begin, end = 0, most
        if self.window_left >= 0:
            begin = min(max(first + self.shift - self.window_left, 0), most)
        if self.window_right >= 0:
            end = min(max(last + self.shift + self.window_right + 1, 0), most)
        return begin, max(begin, end)

    def visible_pairs(self) -> int:
        """Return the number of unmasked (query, key) pairs of one head of one sequence."""
        right = self.shift + self.window_right if self.window_right >= 0 else self.seqlen_k
        pairs = _pairs_up_to(self.seqlen_q, self.seqlen_k, right)
        if self.window_left >= 0:
            left = self.shift - self.window_left - 1
            pairs -= _pairs_up_to(self.seqlen_q, self.seqlen_k, left)
        return max(0, pairs)


def _pairs_up_to(rows: int, keys: int, diagonal: int) -> int:
    """Return the pairs with key ≤ row + ``diagonal``: Σ over rows of clamp(row + diagonal + 1, 0,
    keys)."""
    full = min(max(keys - diagonal - 1, 0), rows)  # the first row that reaches the last key
    first = min(max(-diagonal, 0), full)  # the first row that reaches key 0
    ramp = (full - first) * (first + full + 2 * diagonal + 1) // 2
    return ramp + (rows - full) * keys
