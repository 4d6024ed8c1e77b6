"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence

from jaxformer.errors import UserError, lone_surrogate


class StopStrings:
    """A filter for one text, which ends it before the first stop string.

    The first stop string is the one completed first, and among those the longest, so the result does not depend on how
    the text is split into pieces. Text that may be the beginning of a stop string is withheld.

    Attributes:
      met: True after a stop string, after which no text is returned.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        """Raise `UserError` for a string that is empty or can never occur."""
        for string in strings:
            if not string:
                raise UserError("a stop string is empty; give it at least 1 character, or omit it.")
            if (start := lone_surrogate(string)) is not None:
                reason = f"character {start} is not valid Unicode"
                raise UserError(f"stop string {string!r} can never occur: {reason}; omit it.")
        self._strings = tuple(strings)
        self._withheld = ""
        self.met = False

    def feed(self, text: str) -> str:
        """Return the text that is safe to show after one more piece."""
        if self.met:
            return ""
        n_withheld, text = len(self._withheld), self._withheld + text
        for end in range(n_withheld + 1, len(text) + 1):
            starts = [end - len(string) for string in self._strings if text.endswith(string, 0, end)]
            if starts:
                self.met, self._withheld = True, ""
                return text[: min(starts)]
        longest = max(map(len, self._strings), default=0)
        starts_in = range(max(0, len(text) - longest + 1), len(text))
        cut = next((i for i in starts_in if any(s.startswith(text[i:]) for s in self._strings)), len(text))
        self._withheld = text[cut:]
        return text[:cut]

    def end(self) -> str:
        """Return the withheld part of a text that ended without a stop string."""
        withheld, self._withheld = self._withheld, ""
        return withheld
