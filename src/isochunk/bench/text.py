"""Endless English prose for prompts, from words and sentence forms of our own."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

__all__ = ["Prose"]

_SYLLABLES = "ba da fen gar hol ir ka lo mar nel or pel qua ris sa tor ul ven wyn yar zel bri cor dal eth".split()

_WORDS = {
    "adjective": (
        "narrow patient crowded silver honest distant careful heavy quiet sudden copper ordinary restless gentle "
        "stubborn pale hollow foreign modest bitter early frozen useful broken wooden crooked generous dusty "
        "familiar cautious brisk shallow ancient lively spare northern damp curious sturdy faded"
    ).split(),
    "person": (
        "surveyor baker pilot teacher archivist carpenter nurse farmer clerk translator ferryman botanist engineer "
        "watchmaker cook librarian shepherd printer physician weaver mason gardener harbourmaster student mayor "
        "fisher judge tailor musician innkeeper"
    ).split(),
    "thing": (
        "bridge ledger orchard engine letter window harbour map lantern river cellar market tower garden bell "
        "contract road machine kitchen valley chapel notebook mill wall boat instrument ditch warehouse signal "
        "station painting archive roof staircase vessel furnace telescope granary canal parcel"
    ).split(),
    "stuff": (
        "rain timber salt copper wool grain smoke patience paper ink clay daylight silence bread snow evidence "
        "weather oil gravel trust coal linen music dust credit ice glass memory fruit sand"
    ).split(),
    "past": (
        "repaired measured described ignored carried examined sold painted counted followed opened remembered "
        "doubted crossed guarded copied watched borrowed weighed returned mended sketched inherited closed "
        "inspected praised moved rebuilt lost found"
    ).split(),
    "slowly": (
        "slowly|twice|again|carefully|before dawn|without a word|for the third time|in good order|by accident|"
        "with some relief|after supper|against advice|at low cost|as agreed|in plain sight|almost by habit"
    ).split("|"),
    "place": (
        "the northern road|the old quarter|the lower town|the far bank|the second floor|the grain exchange|the coast|"
        "the assembly hall|the railway yard|the hills above the lake|the customs house|the eastern gate|the reading "
        "room|the quay|the upper meadow|the print shop|the ferry landing|the school"
    ).split("|"),
    "when": (
        "In the spring|That evening|By the end of the week|Some years later|On the following morning|Until then|"
        "During the long winter|Towards noon|After the flood|In those months|Once the harvest was in|Only then|"
        "At the first frost|Before the meeting"
    ).split("|"),
    "reason": (
        "because nobody had asked|since the price had doubled|although the records disagreed|so that others could "
        "use it|as the law required|while the light lasted|unless the weather turned|because the first attempt had "
        "failed|though it was hardly worth the trouble|since there was no other way across|as far as anyone could "
        "tell|because two of the numbers did not match"
    ).split("|"),
}

_FORMS = (
    "{when}, the {adjective} {person} {past} the {thing} near {place}.",
    "The {thing} was {adjective}, and the {person} {past} it {slowly}.",
    "Nobody in {place} {past} the {adjective} {thing}, {reason}.",
    "{when} a {person} from {name} {past} {number} sacks of {stuff} and one {adjective} {thing}.",
    "It took {number} days to cross {place}, {reason}.",
    "What the {person} called {stuff} was in truth a {adjective} kind of {stuff}.",
    "{name}, the {adjective} {person}, {past} both the {thing} and the {thing} {slowly}.",
    "There was {stuff} in every {thing}, {reason}, and the {person} {past} all of it.",
    "A letter from {name} said that the {thing} at {place} had been {past} {slowly}.",
    '"We {past} the {thing} ourselves," said the {person}, "{reason}."',
    "Between {place} and the {adjective} {thing} lay {number} miles of {stuff}.",
    "{when}, {reason}, the {person} and the {person} {past} the same {thing}.",
    "If the {adjective} {thing} had held, {name} would have {past} the {stuff} {slowly}.",
    "The account of {name} lists {number} items: {stuff}, {stuff}, a {adjective} {thing}, and some {stuff}.",
)


class Prose:
    """Texts that read like English and share no beginning.

    Args:
        seed: the same seed gives the same texts in the same order.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._openings: set[str] = set()

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
        sentence = self._random.choice(_FORMS)
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
        return self._random.choice(_WORDS[slot])

    def _name(self) -> str:
        return "".join(self._random.choice(_SYLLABLES) for _ in range(self._random.randint(2, 4))).capitalize()
