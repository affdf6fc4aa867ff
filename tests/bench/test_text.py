import re
from itertools import islice

from isochunk.bench.text import Prose


def beginning(prose: Prose, paragraphs: int = 1) -> str:
    return "".join(islice(prose.paragraphs(), paragraphs))


def test_no_two_texts_share_their_first_words():
    prose = Prose(1)
    starts = {tuple(beginning(prose).split()[:2]) for _ in range(500)}
    assert len(starts) == 500


def test_same_seed_gives_the_same_texts_and_another_seed_others():
    texts = [beginning(Prose(seed), 5) for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_text_goes_on_without_repeating_itself():
    paragraphs = list(islice(Prose(3).paragraphs(), 200))
    assert len(set(paragraphs)) == 200


def test_every_slot_is_filled_and_articles_agree():
    text = beginning(Prose(5), 300)
    assert not re.search(r"[{}|]", text)
    assert not re.search(r"\ba [aeiou]", text, re.IGNORECASE)
