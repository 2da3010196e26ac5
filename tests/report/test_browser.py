"""The episodes of a report page in a real Chromium: list, search, links, keyboard, conversation."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from soulkit.eval.results.summary import summarise
from soulkit.report import explorer
from soulkit.report.load import load_runs
from soulkit.report.pages import write_page
from soulkit.runs.records import record_line
from soulkit.types import Completion, Episode, Line, Segment, Trace, Turn
from tests.support import judged
from tests.support.evaluation import soul, write_records
from tests.support.pages import EVIL, Open, axe_violations, episode, no_browser, pair, spoken
from tests.support.servers.openai_server import ScriptedServer

if TYPE_CHECKING:
    from playwright.sync_api import Page

if no_browser():  # one line for all tests
    pytest.skip(no_browser(), allow_module_level=True)
pytestmark = pytest.mark.slow


def page_of(*runs: Path, out: Path) -> Path:
    return write_page(load_runs(runs, episodes=False), out)


@pytest.fixture(scope="session")
def demo_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the scripted demo: two evaluations of 450 questions and 40 dialogues."""
    folder = tmp_path_factory.mktemp("demo")
    assert soul("demo", "--scripted", "--out", folder / "demo") == 0
    return folder / "demo" / "report" / "index.html"


FACTS = {
    "What improved": r"^\w+ \(\w+\), 'careful' compared with 'careless'\. The task: \w+",
    "By how much": r"^\+\d\.\d{3} \[\+\d\.\d{3}, \+\d\.\d{3}\], from \d\.\d{3} to \d\.\d{3}$",
    "How certain": r"interval excludes zero; p < 0\.0001 .*\d+ episodes, \d+ clusters",
    "Why": r"Another model: '[\w.]+:careful' instead of '[\w.]+:careless'",
    "What got worse": r"^Nothing got clearly worse; \d+ differences checked",
    "Who judged": r"^Rules; no judge model was asked$",
    "On which rows": r"^The same in both runs: \d+ of \d+ episodes of \w+ scored in both",
}


@pytest.mark.parametrize("dark", [False, True])
def test_the_first_screen_states_seven_facts(demo_page: Path, open_page: Open, dark: bool) -> None:
    page = open_page(demo_page, width=1280, height=800, dark=dark)
    seen = page.evaluate(
        """() => [...document.querySelectorAll("h1, dl.key > div")].map(
          (e) => [e.innerText.split("\\n").join(" | "), e.getBoundingClientRect().bottom])"""
    )
    assert all(bottom <= 800 for _, bottom in seen), seen
    (claim, _), *facts = seen
    assert re.search(
        r"^'careful' scores 1\.000 on \w+ \(\w+\), up from 0\.\d+ in 'careless'\.$", claim
    )
    said = dict(text.split(" | ", 1) for text, _ in facts)
    assert list(said) == list(FACTS)
    assert not [name for name, form in FACTS.items() if not re.search(form, said[name])], said
    assert claim not in page.title()  # the title names the runs
    assert "careless" in page.title() and "careful" in page.title()


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_no_page_scrolls_sideways(demo_page: Path, open_page: Open, width: int) -> None:
    page = open_page(demo_page, width=width)
    root = "document.documentElement"
    assert page.evaluate(f"{root}.scrollWidth <= {root}.clientWidth")
    order = page.evaluate("[...document.querySelectorAll('h1, h2')].map((e) => e.innerText)")
    assert order[1:5] == ["Results", "Why", "How certain", "Episodes"]
    assert page.locator("h1").count() == 1


@pytest.fixture(scope="session")
def panel_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Essays that two judges grade differently."""
    folder = tmp_path_factory.mktemp("panel")
    rows = judged.write_rows(folder / "rows.jsonl", 5)

    def milder(body: dict[str, Any]) -> str:
        i = judged.topic(body)
        return judged.opinion(1 + i % 9 + i % 3, "lively" if i % 2 else "plain")

    other = ScriptedServer(answer=milder)
    with ScriptedServer(answer=judged.judge()) as server, other:
        run = judged.evaluated(
            folder / "run", rows, server.base_url, "--judge", f"endpoint:k@{other.base_url}"
        )
    return page_of(run, out=folder / "page.html")


@pytest.fixture(scope="session")
def training_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafts with feedback and refined replies of two runs, and a dialogue with private parts."""
    folder = tmp_path_factory.mktemp("training")
    steps = [pair(i, i % 2, (i % 3) / 2, step=1 + i // 4) for i in range(12)]
    tagged = [
        replace(one, tags={"order": f"{i % 3}", "question": "a_long_name " * 8})
        for i, both in enumerate(steps)
        for one in both
    ]
    first = write_records(folder / "first", [*tagged, spoken(dialogue("Fine."))])
    second = write_records(folder / "second", [spoken(dialogue("Not well."))])
    return page_of(first, second, out=folder / "page.html")


def dialogue(words: str) -> Episode:
    told = (Segment("system", "You are Mia and you hide a hen."), Segment("user", "How are you?"))
    reply = Completion(text=f"<say>{words}</say>", reasoning="I must not mention the hen.")
    return Episode(
        example_id="talk-1", task="talk", traces=(Trace("Mia", (Turn(told, reply),)),),
        transcript=(Line("Ann", "How are you?"), Line("Mia", words)),
    )  # fmt: skip


def link(run: str, example: str, step: int = 0, **rest: str) -> str:
    wanted = {"episode": f"{run}/{step}/{example}/0", **rest}
    return "#" + "&".join(f"{name}={quote(value, safe='')}" for name, value in wanted.items())


def counts(page: Page, text: str | re.Pattern[str]) -> int:
    """Wait until the line above the list has this text; the number of episodes in the list."""
    from playwright.sync_api import expect

    expect(page.locator("#count")).to_have_text(text)
    return int(page.locator("#count").inner_text().split()[0].replace(",", ""))


def ready(page: Page) -> Page:
    page.locator("#episodes:not([aria-busy])").wait_for()
    return page


def expect_in_sight(page: Page, selector: str) -> None:
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_be_in_viewport()


def choose(page: Page, name: str, value: str) -> None:
    page.locator(f"#filters select[name='{name}']").select_option(value)


# -- the list --------------------------------------------------------------------------------------


def test_only_rows_in_sight_are_elements(demo_page: Path, open_page: Open) -> None:
    page = ready(open_page(demo_page))
    counts(page, "980 episodes")
    assert 10 < page.locator(".row").count() < 60
    page.locator("#list").evaluate("list => { list.scrollTop = list.scrollHeight; }")
    page.locator(".row[data-at='979']").wait_for()


def test_filters_narrow_the_list_and_reset_undoes_them(demo_page: Path, open_page: Open) -> None:
    page = ready(open_page(demo_page))
    choose(page, "run", "careless")
    choose(page, "task", "secret_keeper")
    counts(page, "40 of 980 episodes")
    choose(page, "outcome", "right")
    counts(page, "0 of 980 episodes")
    choose(page, "outcome", "wrong")
    counts(page, "40 of 980 episodes")
    page.get_by_role("button", name="Reset").click()
    choose(page, "tag:order", "1")
    assert 0 < counts(page, re.compile("of 980")) < 900
    page.get_by_role("button", name="Reset").click()
    counts(page, "980 episodes")


def test_sorting_orders_by_any_metric(training_page: Path, open_page: Open) -> None:
    page = ready(open_page(training_page))
    choose(page, "sort", "-gain")
    gains = [float(row.split()[-4]) for row in page.locator(".row").all_inner_texts() if "→" in row]
    assert gains == sorted(gains, reverse=True) and gains[0] == 1
    page.get_by_label("gain > 0").check()
    counts(page, f"{sum(gain > 0 for gain in gains)} of 14 episodes")
    offered = page.locator("select[name=sort] option").all_inner_texts()
    assert {"Score ↓", "Gain ↑", "length ↑", "Step ↓"} <= set(offered)


def test_search_reads_all_texts(demo_page: Path, open_page: Open) -> None:
    page = ready(open_page(demo_page))
    page.get_by_label("Search", exact=True).fill("that is mine to KNOW")  # in a dialogue's middle
    counts(page, "40 of 980 episodes")
    assert set(page.locator(".row .task .dim").all_inner_texts()) == {" careful"}
    assert "q=that+is+mine" in page.url
    page.get_by_label("Search", exact=True).fill("")
    counts(page, "980 episodes")


def test_a_search_shows_first_hits_early_and_stops(
    tmp_path: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explorer, "CHUNK", 3000)
    run = write_records(tmp_path / "run", [episode(i, 1.0, text=f"needle {i}") for i in range(400)])
    page = ready(open_page(page_of(run, out=tmp_path / "page")))
    page.evaluate(
        "() => { const add = document.head.append.bind(document.head);"
        " document.head.append = (script) => setTimeout(() => add(script), 60); }"
    )
    page.get_by_label("Search", exact=True).fill("is the cup")
    found = counts(page, re.compile("^[1-9][0-9]* of 400 episodes"))
    page.get_by_role("button", name="Stop search").click()
    stopped = counts(page, re.compile("of 400"))
    assert 0 < found <= stopped < 400
    page.wait_for_timeout(400)
    assert counts(page, re.compile("of 400")) == stopped
    assert page.locator("#far").is_hidden()


def test_judges_who_disagree_can_be_filtered_and_sorted(panel_page: Path, open_page: Open) -> None:
    page = ready(open_page(panel_page))
    page.get_by_label("judges disagree").check()
    counts(page, "3 of 5 episodes")
    choose(page, "sort", "-apart")
    page.locator("#measure", has_text="Disagreement").wait_for()
    assert page.locator(".row .val.dim").all_inner_texts() == ["2", "1", "1"]


# -- links and keys --------------------------------------------------------------------------------


def test_a_link_reproduces_the_view(demo_page: Path, open_page: Open) -> None:
    page = ready(open_page(demo_page))
    choose(page, "run", "careful")
    choose(page, "sort", "-metric:turns")
    page.get_by_label("Search", exact=True).fill("treasure")
    page.wait_for_url(lambda url: "q=treasure" in url)
    page.locator("#far").wait_for(state="hidden")
    seen, rows = counts(page, re.compile("of 980")), page.locator(".row").all_inner_texts()
    again = ready(open_page(demo_page, fragment="#" + page.url.split("#")[1]))
    counts(again, f"{seen} of 980 episodes")
    assert again.locator(".row").all_inner_texts() == rows
    assert again.get_by_label("Search", exact=True).input_value() == "treasure"


def test_every_episode_has_a_link(training_page: Path, open_page: Open) -> None:
    page = ready(open_page(training_page, fragment=link("first", "rooms-5", step=2)))
    assert page.locator("#episode-title").inner_text().startswith("rooms")
    assert "example rooms-5" in page.locator("#episode .about").inner_text()
    assert page.locator("#explorer").is_hidden()
    gone = ready(open_page(training_page, fragment=link("first", "rooms-99")))
    assert "no episode 'first/0/rooms-99/0'" in gone.get_by_role("alert").inner_text()
    assert gone.locator("#explorer").is_visible()
    expect_in_sight(gone, "#trouble")


def test_the_keyboard_reaches_everything(demo_page: Path, open_page: Open) -> None:
    page = ready(open_page(demo_page, fragment="#task=secret_keeper&run=careful"))
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "q"
    page.locator(".row a").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.closest('.row').dataset.at") == "2"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.locator("#place", has_text="3 of 40").wait_for()
    page.keyboard.press("ArrowRight")
    page.locator("#place", has_text="4 of 40").wait_for()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.locator("#place", has_text="2 of 40").wait_for()
    page.keyboard.press("Escape")
    page.locator("#explorer").wait_for()
    assert page.evaluate("document.activeElement.closest('.row').dataset.at") == "1"
    assert "task=secret_keeper" in page.url and "episode=" not in page.url


def test_long_lists_are_read_with_the_keyboard(demo_page: Path, open_page: Open) -> None:
    page = ready(open_page(demo_page))
    page.locator(".row a").first.focus()
    places = []
    for key in ("PageDown", "End", "PageUp", "Home"):
        page.keyboard.press(key)
        page.wait_for_timeout(100)
        places.append(page.evaluate("Number(document.activeElement.closest('.row')?.dataset.at)"))
    screen = places[0]
    assert 5 < screen < 40 and places == [screen, 979, 979 - screen, 0]


@pytest.mark.parametrize("way", ["Escape", "← List"])
def test_leaving_an_episode_keeps_the_place(demo_page: Path, open_page: Open, way: str) -> None:
    """Without a filter, the address has no more words after its #."""
    page = ready(open_page(demo_page))
    page.locator(".row a").nth(3).click()
    page.locator("#episode-title").wait_for()
    page.keyboard.press(way) if way == "Escape" else page.get_by_role("button", name=way).click()
    page.locator("#explorer").wait_for()
    page.wait_for_timeout(100)
    expect_in_sight(page, ".row[data-at='3']")
    page.go_back()
    page.locator("#episode-title").wait_for()


def test_back_returns_to_the_list(demo_page: Path, open_page: Open) -> None:
    page = ready(open_page(demo_page, fragment="#task=secret_keeper"))
    page.locator(".row a").first.click()
    page.locator("#episode-title").wait_for()
    page.go_back()
    page.locator("#explorer").wait_for()
    counts(page, "80 of 980 episodes")


# -- an episode ------------------------------------------------------------------------------------


def test_a_dialogue_reads_as_a_conversation(training_page: Path, open_page: Open) -> None:
    page = ready(open_page(training_page, fragment=link("first", "talk-1")))
    turns = page.locator("#episode .turn")
    assert turns.locator(".who").all_inner_texts() == ["Ann", "Mia"]
    left, right = (turns.nth(i).locator(".said").bounding_box() for i in range(2))
    assert left and right and left["x"] < right["x"]
    private = page.locator("#episode details", has_text="only Mia sees this")
    assert private.locator("summary").all_inner_texts() == [
        "Mia: instructionsonly Mia sees this", "Mia: first messageonly Mia sees this",
        "Thinkingonly Mia sees this", "As writtenonly Mia sees this",
    ]  # fmt: skip
    for words in ("you hide a hen", "must not mention the hen", "<say>Fine.</say>"):
        assert private.locator(".text", has_text=words).count() == 1


def test_draft_feedback_and_refined_reply_are_side_by_side(
    training_page: Path, open_page: Open
) -> None:
    page = ready(open_page(training_page, fragment=link("first", "rooms-5", step=2)))
    sides = page.locator("#episode .side")
    assert sides.locator("h4").all_inner_texts() == ["Draft\n1.000", "Feedback", "Refined\n1.000"]
    tops = {round(box["y"]) for i in range(3) if (box := sides.nth(i).bounding_box())}
    assert len(tops) == 1
    assert page.locator("del").all_inner_texts() == ["draft"]
    assert page.locator("ins").all_inner_texts() == ["refined"]
    assert "saw this before the refined reply" in sides.nth(1).inner_text()
    assert "reader did not see this" in page.locator(".unseen", has_text="Gold answer").inner_text()


def test_feedback_of_another_example_is_marked_as_what_was_given(
    tmp_path: Path, open_page: Open
) -> None:
    draft, _ = pair(0, 0.0, 1.0, feedback="On this draft.")
    _, refined = pair(0, 0.0, 1.0, feedback="On another draft.")
    run = write_records(tmp_path / "run", [draft, refined])
    page = ready(open_page(page_of(run, out=tmp_path / "page.html")))
    page.locator(".row a").click()
    lines = page.locator("section[aria-label=Feedback] > *").all_inner_texts()
    assert [line for line in lines if "feedback (" not in line] == [
        "Feedback on the draft", "reader did not see this", "On this draft.",
        "Feedback that was given", "reader saw this before the refined reply", "On another draft.",
    ]  # fmt: skip


def test_verdicts_name_the_judges_and_calls_load_on_demand(
    panel_page: Path, open_page: Open
) -> None:
    page = ready(open_page(panel_page))
    page.locator(".row a").first.click()
    verdicts = page.locator(".unseen .verdict")
    assert verdicts.locator("h5").all_inner_texts() == ["judged by j", "judged by k"]
    assert verdicts.first.locator("dt").all_inner_texts() == ["quality", "style"]
    assert "so it seems" in verdicts.first.inner_text()
    assert page.locator(".call").count() == 0
    page.get_by_text("Raw calls").click()
    page.locator(".call").first.wait_for()
    heads = page.locator(".call h5").all_inner_texts()
    assert sorted(heads) == ["actor m", "judge j", "judge k"]
    assert page.locator(".call .tag").all_inner_texts() == ["writer did not see this"] * 2
    assert page.locator(".call .text", has_text="topic").count() >= 2


def test_the_same_example_of_two_runs_is_side_by_side(training_page: Path, open_page: Open) -> None:
    page = ready(open_page(training_page, fragment=link("first", "talk-1")))
    page.get_by_label("Compare with").select_option("second")
    sides = page.locator("#episode .side h4")
    sides.nth(1).wait_for()
    assert [text.split("\n")[0] for text in sides.all_inner_texts()] == [
        "first: draft, step 0",
        "second: draft, step 0",
    ]
    assert page.locator("del").all_inner_texts() == ["Fine"]
    assert page.locator("ins").all_inner_texts() == ["Not", "well"]
    assert "with=second" in page.url


# -- how it looks ----------------------------------------------------------------------------------

VIEWS = {"list": "#", "pair": link("first", "rooms-5", step=2), "talk": link("first", "talk-1")}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 768, 390])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_no_violation(
    training_page: Path, view: str, width: int, dark: bool, open_page: Open
) -> None:
    page = ready(open_page(training_page, width=width, dark=dark, fragment=VIEWS[view]))
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert axe_violations(page, "#episodes") == []
    section = page.locator("#episodes")
    assert section.evaluate("(one) => one.scrollWidth - one.clientWidth") <= 0
    about = page.locator("#episode .about").all()
    assert all(one.evaluate("(one) => one.scrollWidth <= one.clientWidth") for one in about)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == dark


def test_scores_on_another_scale_are_neither_right_nor_wrong(
    tmp_path: Path, open_page: Open
) -> None:
    grades = [episode(i, -2.0 + i, task="grades") for i in range(6)]
    run = write_records(tmp_path / "run", [*grades, episode(0, 1.0), episode(1, None)])
    page = ready(open_page(page_of(run, out=tmp_path / "page.html")))
    dots = page.locator(".row .dot").evaluate_all("all => all.map((one) => one.ariaLabel)")
    assert dots == ["scored"] * 6 + ["right", "unscored"]
    choose(page, "outcome", "scored")
    counts(page, "6 of 8 episodes")


def test_forced_colours_keep_dots_and_bars(demo_page: Path, open_page: Open) -> None:
    page = ready(open_page(demo_page))
    page.emulate_media(forced_colors="active")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    for name in (".row .dot", ".strip b", ".swatch"):
        colour = page.locator(name).first.evaluate("one => getComputedStyle(one).backgroundColor")
        assert colour != paper, name


def test_columns_are_stacked_on_a_phone(training_page: Path, open_page: Open) -> None:
    page = ready(open_page(training_page, width=390, fragment=VIEWS["pair"]))
    boxes = [page.locator("#episode .side").nth(i).bounding_box() for i in range(3)]
    assert len({round(box["x"]) for box in boxes if box}) == 1
    assert sorted(box["y"] for box in boxes if box) == [box["y"] for box in boxes if box]


@pytest.mark.parametrize("view", VIEWS)
def test_print_shows_the_episode_without_controls(
    training_page: Path, view: str, open_page: Open
) -> None:
    page = ready(open_page(training_page, fragment=VIEWS[view]))
    page.emulate_media(media="print")
    assert not page.locator("#filters").is_visible()
    assert not page.locator("#episode nav").is_visible()
    if view == "list":
        heights = page.locator("#list").evaluate("(one) => [one.clientHeight, one.scrollHeight]")
        assert heights[0] == heights[1] > 14 * 20
    else:
        assert page.locator("#episode .said").first.is_visible()


def test_without_scripts_a_sentence_says_what_to_do(training_page: Path, open_page: Open) -> None:
    page = open_page(training_page, scripts=False)
    assert "soul show" in page.locator("#episodes").inner_text()
    assert not page.locator("#explorer").is_visible()


# -- hostile, huge, many ---------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1280, 390])
def test_long_words_wrap_in_an_episode(tmp_path: Path, open_page: Open, width: int) -> None:
    one, long = episode(0, 1.0), "W" * 3000
    score = replace(one.score, metrics={long: 1.0}, words=long)
    run = write_records(tmp_path / "run", [replace(one, score=score, tags={long: long}, gold=long)])
    page = ready(open_page(page_of(run, out=tmp_path / "page.html"), width=width))
    page.locator(".row a").click()
    page.locator("#episode-title").wait_for()
    root = "document.documentElement"
    assert page.evaluate(f"{root}.scrollWidth <= {root}.clientWidth")


def test_hostile_texts_are_harmless(tmp_path: Path, open_page: Open) -> None:
    draft, refined = pair(0, 0.0, 1.0, task=EVIL, feedback=EVIL)
    evil = Line(EVIL, EVIL)
    turn = Turn(
        (Segment("system", EVIL), Segment("user", EVIL)), Completion(text=EVIL * 3, reasoning=EVIL)
    )
    talk = Episode(
        example_id=EVIL, task=EVIL, traces=(Trace(EVIL, (turn,)),), transcript=(evil, evil)
    )
    records = [replace(one, gold=EVIL, tags={EVIL: EVIL}) for one in (draft, refined)]
    run = write_records(tmp_path / "run", [*records, replace(spoken(talk), gold=EVIL)])
    page = ready(open_page(page_of(run, out=tmp_path / "page.html")))
    page.get_by_label("Search", exact=True).fill("<img src=x onerror")
    counts(page, "2 episodes")
    for at in range(2):
        page.locator(f".row[data-at='{at}'] a").click()
        page.locator(f"#place:has-text('{at + 1} of 2')").wait_for()
        assert page.locator("#episode .text", has_text="<img src=x").count() >= 2
        assert page.locator("#episodes :is(img, script, iframe, object)").count() == 0
        assert "\u202e" not in page.locator("#episode").inner_text()
        page.keyboard.press("Escape")
        page.locator("#explorer").wait_for()
    assert page.evaluate("window.broken ?? 0") == 0


def test_a_huge_text_is_folded_and_opens_whole(tmp_path: Path, open_page: Open) -> None:
    words = " ".join(f"word{i}" for i in range(60_000))
    both = pair(0, 0.0, 1.0)
    long = [replace(one, episode=episode(0, 1.0, text=f"{words} {one.kind}", kind=one.kind).episode)
            for one in both]  # fmt: skip
    run = write_records(tmp_path / "run", long)
    page = ready(open_page(page_of(run, out=tmp_path / "page.html")))
    page.locator(".row a").first.click()
    said = page.locator("#episode .own .said").first
    assert len(said.inner_text()) < 10_000
    said.get_by_role("button").click()
    assert len(said.inner_text()) > 500_000
    assert said.locator("del").all_inner_texts() == ["draft"]


def test_a_folder_opens_from_disk_and_notices_that_it_was_rewritten(
    training_page: Path, tmp_path: Path, open_page: Open
) -> None:
    out = page_of(
        *(training_page.parent / name for name in ("first", "second")), out=tmp_path / "p"
    )
    page = ready(open_page(out, fragment=VIEWS["pair"]))
    assert page.locator("#episode .said").count() == 3
    chunk = out.parent / "episodes" / "00001.js"
    name, digest, text = json.loads(f"[{chunk.read_text()[len('soulkitChunk(') : -3]}]")
    chunk.write_text(f'soulkitChunk("{name}","{digest[::-1]}","{text}");\n')
    late = open_page(out, fragment=VIEWS["pair"])
    late.get_by_role("alert").wait_for()
    assert "Reload this page" in late.get_by_role("alert").inner_text()
    expect_in_sight(late, "#trouble")


def hundred_thousand() -> Iterator[str]:
    """The lines of 100,000 different episodes of about 1,000 characters."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(3000)]
    made = json.dumps(record_line(episode(0, 0.123, text="REPLY")))
    made = made.replace("rooms-0", "ID").replace("Question 0: where is the cup?", "PROMPT")
    for i in range(100_000):
        line = made.replace("ID", f"rooms-{i}").replace("0.123", f"{i % 7 / 7:.3f}")
        line = line.replace("PROMPT", " ".join(chance.choices(words, k=100)))
        yield line.replace("REPLY", " ".join(chance.choices(words, k=30))) + "\n"


BUILD = """
import sys
from pathlib import Path
from soulkit.cli.app import main
code = main(["report", sys.argv[1], "--format", "html", "--out", sys.argv[2]])
(peak,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
print(code, int(peak.split()[1]) // 1024)
"""
"""Builds a page and prints the exit code and the peak of memory in MB. (ru_maxrss would include the
memory of the process that started this one.)"""


def test_a_hundred_thousand_episodes(tmp_path: Path, open_page: Open) -> None:
    run = write_records(tmp_path / "run", [])
    scored = summarise([episode(i, i % 7 / 7) for i in range(100_000)], command="eval", model="m",
                       protocol="paper", seconds=1.0, cost=None)  # fmt: skip
    (run / "summary.json").write_text(json.dumps(scored.to_json()))
    with (run / "episodes.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(hundred_thousand())
    built = subprocess.run(
        [sys.executable, "-c", BUILD, run, tmp_path / "page"], capture_output=True, text=True
    )
    code, megabytes = map(int, built.stdout.split()[-2:])
    assert code == 0 and megabytes <= 300, built.stderr
    page = ready(open_page(tmp_path / "page" / "index.html"))
    counts(page, "100,000 episodes")
    paint: list[dict[str, Any]] = page.evaluate(
        "[...performance.getEntriesByType('paint'), ...performance.getEntriesByType('mark')]"
        ".map((one) => ({name: one.name, at: one.startTime}))"
    )
    times = {one["name"]: one["at"] for one in paint}
    assert times["first-contentful-paint"] <= 3000
    assert times["episodes-shown"] <= 3000
    choose(page, "sort", "-score")
    assert page.locator(".row .val").nth(1).inner_text() == "0.857"
