"""Who computes what others wait for: of requests with the same beginning, one prefills it for all."""

from __future__ import annotations

from collections.abc import Iterable

from lm_engine.prefix_cache import ROOT, BlockContent
from lm_engine.sequence import Sequence, State

Head = tuple[int, BlockContent]  # the block that a prefill computes next: what lies before it, what it holds


class SharedPrefills:
    """The running prefills by their next block. A waiting sequence whose first missing block is one of these
    would compute it, and what the two share behind it, once more; its turn comes when they part.

    It waits for nobody but a running prefill, which waits for nobody, and needs no more of it than it would
    compute itself: all ends when the prefill has passed what they share, or stops running.
    """

    def __init__(self, block_size: int, min_tokens: int | None) -> None:
        """`min_tokens`: what sharing must save; None: nobody waits."""
        self._block_size = block_size
        self._min_blocks = None if min_tokens is None else max(1, -(-min_tokens // block_size))
        self._by_head: dict[Head, Sequence] = {}
        self._heads: dict[Sequence, Head] = {}
        # Who waits → for whom, until it has so many blocks; and the other way round.
        self._behind: dict[Sequence, tuple[Sequence, int]] = {}
        self._followers: dict[Sequence, dict[Sequence, None]] = {}
        self._freed: dict[Sequence, None] = {}

    def advanced(self, seq: Sequence) -> None:
        """The prefill begins, or its full blocks so far are in the prefix cache."""
        if self._min_blocks is None:
            return
        self._lose_head(seq)
        contents, done = seq.request.prompt_contents(self._block_size), len(seq.identities)
        if done < len(contents):
            head = (seq.identities[-1] if done else ROOT, contents[done])
            if self._by_head.setdefault(head, seq) is seq:
                self._heads[seq] = head
        self._free_followers(seq)

    def stopped(self, seq: Sequence) -> None:
        """It prefills no longer, or will say where it is."""
        self._lose_head(seq)
        self._free_followers(seq)

    def _lose_head(self, seq: Sequence) -> None:
        head = self._heads.pop(seq, None)
        if head is not None:
            del self._by_head[head]

    def _free_followers(self, seq: Sequence) -> None:
        for follower in list(self._followers.get(seq, ())):
            if not self.still_behind(follower):
                self._freed[follower] = None

    def take_freed(self) -> list[Sequence]:
        """Those who have been behind another and are so no more, since the last call."""
        freed, self._freed = list(self._freed), {}
        return freed

    def forget(self, seq: Sequence) -> None:
        """It waits no longer."""
        self._freed.pop(seq, None)
        self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        if seq not in self._behind:
            return
        other, _ = self._behind.pop(seq)
        followers = self._followers[other]
        del followers[seq]
        if not followers:
            del self._followers[other]

    def still_behind(self, seq: Sequence) -> bool:
        """Whether what `is_behind` found still holds; no look-up."""
        if seq not in self._behind:
            return False
        other, num_blocks = self._behind[seq]
        if other in self._heads and len(other.identities) < num_blocks:
            return True
        self._leave(seq)
        return False

    def is_behind(self, seq: Sequence, identities: list[int]) -> bool:
        """Whether a waiting sequence, of which these blocks are cached, should wait for another."""
        if self._min_blocks is None:
            return False
        done = len(identities)
        mine = seq.request.prompt_contents(self._block_size)
        if done + self._min_blocks > len(mine):
            return False
        other = self._by_head.get((identities[-1] if done else ROOT, mine[done]))
        if other is None:
            return False
        theirs = other.request.prompt_contents(self._block_size)
        shared = _num_equal(zip(mine[done:], theirs[done:], strict=False))
        if shared < self._min_blocks:
            return False
        assert other is not seq, f"{seq.request.id} waits for itself"
        self._behind[seq] = (other, done + shared)
        self._followers.setdefault(other, {})[seq] = None
        self._freed.pop(seq, None)
        return True

    def check_integrity(self, prefilling: Iterable[Sequence], waiting: Iterable[Sequence]) -> str | None:
        if not self._heads.keys() <= set(prefilling):
            return "others wait for a sequence that does not prefill"
        if not self._behind.keys() <= set(waiting) or any(s.state is not State.WAITING for s in self._behind):
            return "a sequence that does not wait is kept behind another"
        if {(s, other) for s, (other, _) in self._behind.items()} != {
            (s, other) for other, followers in self._followers.items() for s in followers
        }:
            return "who waits for a prefill and whom it keeps waiting differ"
        return None


def _num_equal(pairs: Iterable[tuple[BlockContent, BlockContent]]) -> int:
    count = 0
    for one, other in pairs:
        if one != other:
            break
        count += 1
    return count
