import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from isochunk.report.data import Arm, Page, Points, Timeline
from isochunk.report.page import render


def timeline(label, chunks, seconds, ours=False):
    return Timeline(
        label=label,
        tokens=8192,
        stages=2,
        chunks=chunks,
        entered_s=(100.0,) * len(chunks),
        measured_s=seconds,
        ours=ours,
    )


PAGE = Page(
    title="A <b>title</b>",
    headline="isochunk's first token came 1.65 times sooner",
    facts=(("model", "m & n"),),
    columns=("tokens", "policy", "TTFT, s"),
    rows=(("8192", "fixed 8192", "3.30"), ("8192", "isochunk", "2.00")),
    notes=("2 x left out",),
    timelines=(
        timeline("fixed", (8192,), (1.6,)),
        timeline("isochunk", (3072, 2560, 2560), (0.6, 0.6, 0.6), ours=True),
    ),
    points=(
        Points(label="probe", kind="fit", measured_s=(0.01, 0.1, 1.0), predicted_s=(0.011, 0.1, 0.95)),
        Points(label="isochunk", kind="ours", measured_s=(0.6,), predicted_s=(0.6,)),
    ),
    arms=(
        Arm(label="fixed 8192", tokens=8192, ttft_s=(3.3, 3.4), predicted_s=3.2),
        Arm(label="isochunk", tokens=8192, ttft_s=(2.0, 2.1), predicted_s=None, ours=True),
        Arm(label="isochunk", tokens=1024, ttft_s=(0.2,), ours=True),
    ),
)


class Reader(HTMLParser):
    """Collects ids, links, text, and checks that elements close in the order they open."""

    def __init__(self, page):
        super().__init__()
        self.ids, self.links, self.tags, self.text, self._open = [], [], [], "", []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "xlink:href", "src"):
                self.links.append(value)
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag != "meta":
            self._open.pop()

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def page():
    return render(PAGE)


@pytest.fixture(scope="module")
def reader(page):
    return Reader(page)


def test_nothing_is_loaded_from_elsewhere(page, reader):
    assert not {"script", "link", "img", "iframe", "image"} & set(reader.tags)
    assert all(link.startswith("#") for link in reader.links)
    assert not re.search(r"@import|url\((?!#)", page)


def test_every_id_is_there_once_and_every_reference_has_its_target(page, reader):
    assert len(set(reader.ids)) == len(reader.ids)
    referenced = {*re.findall(r"url\(#([^)]+)\)", page), *(link[1:] for link in reader.links)}
    assert referenced <= set(reader.ids)


def test_text_is_escaped(page):
    assert "A &lt;b&gt;title&lt;/b&gt;" in page
    assert "m &amp; n" in page


def test_chunk_sizes_stand_on_the_bars_of_each_stage(reader):
    assert reader.text.count("2560") == 4
    assert reader.text.count("3072") == 2


def test_title_of_a_timeline_says_time_chunks_and_idle_share(reader):
    assert "fixed: first token after 3.20 s, 1 chunk, stages idle 50% of the time" in reader.text
    assert "isochunk: first token after 2.40 s, 3 chunks, stages idle 25% of the time" in reader.text


def test_colours_follow_the_theme(page):
    figures = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert "var(--ours)" in figures
    assert set(re.findall(r"#[0-9a-f]{6}\b", figures)) <= {"#000000"}
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", page))
    for theme in re.findall(r":root \{(.*?)\}", page, re.DOTALL):
        assert used <= set(re.findall(r"(--[a-z0-9-]+):", theme))


def test_same_data_gives_the_same_page(page):
    assert render(PAGE) == page


def test_parts_without_data_are_left_out():
    text = Reader(render(replace(PAGE, rows=(), facts=(), timelines=(), points=(), arms=()))).text
    for heading in ("Where the stages wait", "Time to first token", "Predicted and measured", "What was measured"):
        assert heading not in text
    assert PAGE.headline in text


def test_single_step_and_many_steps_can_be_drawn():
    many = timeline("many", (64,) * 500, (0.01,) * 500)
    one = Points(label="one", kind="other", measured_s=(0.5,), predicted_s=(0.5,))
    assert Reader(render(replace(PAGE, timelines=(many,), points=(one,)))).text.count("500 chunks") == 1
