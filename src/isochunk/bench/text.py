"""Endless English prose for prompts, from our own words and sentence forms."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from random import Random

__all__ = ["Prose"]


def _vocabulary() -> dict[str, list[str]]:
    """What can stand in each slot of a sentence form, from ``words.txt``."""
    words: dict[str, list[str]] = {}
    for line in (files("isochunk.bench") / "words.txt").read_text(encoding="utf-8").splitlines():
        slot, _, entries = line.partition(": ")
        if not slot.startswith("#"):
            words.setdefault(slot, []).extend(entry.strip() for entry in entries.split("|"))
    return words


class Prose:
    """Texts that read like English and share no beginning.

    Args:
        seed: the same seed gives the same texts in the same order.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._openings: set[str] = set()
        self._words = _vocabulary()

    def paragraphs(self) -> Iterator[str]:
        """A new text, paragraph by paragraph, without end; its first words were in no text before it."""
        yield f"{self._opening()} {self._paragraph()}"
        while True:
            yield f"\n\n{self._paragraph()}"

    def _opening(self) -> str:
        while True:
            opening = f"{self._name()} {self._random.randrange(10_000, 1_000_000)}, {self._name()}."
            if opening not in self._openings:
                self._openings.add(opening)
                return opening

    def _paragraph(self) -> str:
        return " ".join(self._sentence() for _ in range(self._random.randint(4, 8)))

    def _sentence(self) -> str:
        sentence = self._random.choice(self._words["form"])
        while "{" in sentence:
            before, _, rest = sentence.partition("{")
            slot, _, after = rest.partition("}")
            word = self._word(slot)
            if before.endswith((" a ", " A ", "A ")) and word[0] in "aeiou":
                before = f"{before[:-1]}n "
            sentence = f"{before}{word}{after}"
        return sentence

    def _word(self, slot: str) -> str:
        if slot == "name":
            return self._name()
        if slot == "number":
            return str(self._random.randint(2, 900))
        return self._random.choice(self._words[slot])

    def _name(self) -> str:
        return "".join(
            self._random.choice(self._words["syllable"]) for _ in range(self._random.randint(2, 4))
        ).capitalize()
