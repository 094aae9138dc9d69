"""Finds stop strings in text that arrives in pieces, holding back only what may still become one."""

from __future__ import annotations


def _borders(pattern: str) -> list[int]:
    """Knuth-Morris-Pratt: for each prefix of the pattern, the length of its longest proper border."""
    borders = [0] * len(pattern)
    matched = 0
    for i in range(1, len(pattern)):
        while matched and pattern[i] != pattern[matched]:
            matched = borders[matched - 1]
        if pattern[i] == pattern[matched]:
            matched += 1
        borders[i] = matched
    return borders


class StopStrings:
    """Ends the text at the stop string that completes first (the longest, if several complete together).

    The result does not depend on how the text was cut into pieces, so a streamed answer equals a plain one.
    Costs O(stops) per character; text without a stop's first letter passes through untouched.
    """

    def __init__(self, stops: tuple[str, ...], *, include_in_output: bool) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._matched = [0] * len(stops)  # characters of each stop that the text's end spells so far
        self._first_letters = frozenset(stop[0] for stop in stops)
        self._include = include_in_output
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Text that is now certain, and the stop string that ended it. Nothing may follow a match."""
        if not self._held and self._first_letters.isdisjoint(piece):
            return piece, None
        for i, letter in enumerate(piece):
            hit = self._advance(letter)
            if hit is not None:
                text = self._held + piece[: i + 1]
                self._held = ""
                return text if self._include else text[: -len(hit)], hit
        text = self._held + piece
        certain = len(text) - max(self._matched)
        self._held = text[certain:]
        return text[:certain], None

    def bypass(self, piece: str) -> str:
        """Text in which no stop string counts (before `min_tokens`)."""
        return self.flush() + piece

    def flush(self) -> str:
        """The held-back tail, when the text ends without a match."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, letter: str) -> str | None:
        hit: str | None = None
        for k, stop in enumerate(self._stops):
            matched, borders = self._matched[k], self._borders[k]
            while matched and letter != stop[matched]:
                matched = borders[matched - 1]
            if letter == stop[matched]:
                matched += 1
            if matched == len(stop):
                if hit is None or len(stop) > len(hit):
                    hit = stop
                matched = borders[matched - 1]
            self._matched[k] = matched
        return hit
