"""Strings that end a text, found in what is made piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from jaxformer.errors import UserError


class StopStrings:
    """The text of one row as far as it can be shown: up to the first stop string, which is not shown.

    The first is the one that is complete first, and among those the longest; so what is shown does not depend on
    the pieces in which the text came. What could be the beginning of a stop string is held back.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        """Raises UserError for a string that is empty or can never occur."""
        for string in strings:
            if not string:
                raise UserError("a stop string is empty; it must have at least 1 character: leave it out.")
            try:
                string.encode()
            except UnicodeEncodeError as error:
                raise UserError(
                    f"stop string {string!r} can never occur: character {error.start} is no Unicode text; leave it out."
                ) from error
        self._strings = tuple(strings)
        self._held = ""
        self.met = False
        """Whether a stop string was met; nothing after it is shown."""

    def feed(self, text: str) -> str:
        """The text that is now safe to show, after one more piece."""
        if self.met:
            return ""
        known, text = len(self._held), self._held + text
        for end in range(known + 1, len(text) + 1):
            starts = [end - len(string) for string in self._strings if text.endswith(string, 0, end)]
            if starts:
                self.met, self._held = True, ""
                return text[: min(starts)]
        longest = max(map(len, self._strings), default=0)
        begun = range(max(0, len(text) - longest + 1), len(text))
        cut = next((i for i in begun if any(s.startswith(text[i:]) for s in self._strings)), len(text))
        self._held = text[cut:]
        return text[:cut]

    def end(self) -> str:
        """What was held back of a text that ended without a stop string."""
        held, self._held = self._held, ""
        return held
