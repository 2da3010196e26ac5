"""Hostile text in every place that a stranger controls: on pages, in tables and in exports."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from soulkit.eval.results.summary import Summary, summarise
from soulkit.notebook import EvaluationResult
from soulkit.report.figures import Chart, Curve, Dot, Plot
from soulkit.report.grid import Grid, GridRow, grid_markdown
from soulkit.report.pages import write_comparison_page
from soulkit.types import Completion, Episode, Line, Record, Segment, Trace, Turn, Verdict
from tests.support.evaluation import write_records
from tests.support.hostile import Attack, seeded, seeds
from tests.support.odd_runs import copy_run
from tests.support.page_checks import MARK, html_faults, markdown_faults, page_faults
from tests.support.pages import episode, pair, spoken
from tests.support.people import closeness, measured_run, memory, road

Run = Callable[[Attack, Iterable[Attack]], None]
TEXTS: dict[str, str] = {
    name: text.replace("@", MARK)
    for name, text in {
        "script": "<script>@()</script>", "image": "<img src=x onerror=@()>", "plain": "@",
        "attribute": "\" onload=@() x='", "quote": "' autofocus onfocus=@() x=\"",
        "end": "</script></style></title></textarea></noscript><script>@()</script>",
        "upper": "</SCRIPT><ScRiPt>@()</sCrIpT>", "data": "]]><![CDATA[ @ ]]>",
        "comment": "<!-- @", "comment end": "--> @ --!>", "odd comment": "<!--><script>@</script>",
        "jinja": "{{ @ }} {% for x in @ %} {# @", "other braces": "${@} #{@} <%= @ %> {{{@}}}",
        "link": "[@](javascript:@) ![@](https://@.example/x.png) <javascript:@>",
        "reference": "[@]: javascript:@\n\n[@][@]", "heading": "# @\n\n---\n> @\n\n- @",
        "fence": "```\n@\n~~~\n<script>@</script>", "table": "| @ | \\| @ |\n|---|---|\n",
        "escapes": "\x1b[2J\x1b]8;;https://@.example\x07@\x1b]8;;\x07\x9b31m\x90@\x9c",
        "title": "\x1b]0;@\x07\x1b]52;c;QA==\x07\x1bc", "bell": "@\x07\x08\x08\x08\r@\x0b\x0c\x7f",
        "directions": "\u202e@\u202c \u2066@\u2069 \u200f@ \u061c", "null": "@\x00@",
        "lines": "@\u2028@\u2029@\x85@\r\n@", "surrogate": "@\ud800@\udfff",
        "noncharacter": "@\ufffe\uffff",
        "word": "@" * 350_000, "marks": "@" + "\u0301" * 10_000, "tags": "@\U000e0041" * 500,
        "family": "@" + "\U0001f468\u200d\U0001f469\u200d" * 2_000,
        "zero width": "@\u200b\u200c\ufeff" * 999,
        "svg": "<svg onload=@()><animate onbegin=@() attributeName=x></svg>",
        "mathml": "<math><mtext><mglyph><style><!--</style><img title='--><img src onerror=@()>'>",
        "css": "url(https://@.example/x) expression(@) ;} body{background:url(//@)} @import '@'",
        "frame": "<iframe srcdoc='<script>@</script>'></iframe><object data=@><embed src=@>",
        "base": "<base href=https://@.example><meta http-equiv=refresh content='0;url=//@'>",
        "form": "<form action=https://@><button formaction=javascript:@>",
        "entities": "&lt;@&gt; &#x3c;script&#62;@ &amp",
        "latex": "\\input{/etc/passwd} $@$ \\write18{@} %@ ^^41 ~ & # _",
        "formula": "=HYPERLINK(\"//@\")",
        "rich": "[link=file:///@]@[/link] [bold red]@ [/] :100: [[",
        "nested": "<" * 3000 + "@" + ">" * 3000,
        "percent": "%s%n%(x)s {0} {x!r} %@", "path": "../../../@", "empty": "", "space": " \t\n ",
    }.items()
}  # fmt: skip
PAGES: tuple[tuple[str, ...], ...] = (
    ("report", "RUN", "--out", "page.html"), ("report", "RUN", "--out", "folder"),
    ("report", "RUN", "--out", "page.md"), ("report", "RUN", "--details"),
    ("report", "RUN", "--out", "page.json", "--details"), ("show", "RUN", "--full"),
    ("show", "RUN"),
    ("report", "RUN", "RUN", "--out", "page.html"), ("report", "RUN", "--out", "page.csv"),
    ("report", "RUN", "--format", "latex"), ("show", "RUN", "--json"),
    ("report", "RUN", "--format", "episodes-csv", "--out", "episodes.csv"),
    ("report", "RUN", "--format", "episodes-parquet", "--out", "e.parquet"), ("runs", "input"),
    ("report", "RUN", "--out", "page.html", "--figures", "figures"),
)  # fmt: skip


def records(text: str) -> list[Record]:
    """A draft, its refined episode, a dialogue and an unscored episode, with this text in every
    field that a model, a judge, a row or a task fills."""
    turn = Turn((Segment("system", text), Segment("user", text)),
                Completion(text=text, reasoning=text))  # fmt: skip
    talk = Episode(example_id=text, task=text, traces=(Trace(text, (turn,)),),
                   transcript=(Line(text, text), Line(text, text)))  # fmt: skip
    verdict = Verdict(judge=text, purpose="score", said={text: text, "why": text}, problem=text)

    def filled(one: Record) -> Record:
        score = replace(one.score, words=text, metrics={text: 0.5, "length": 3.0},
                        prompts={text: text}, verdicts=(verdict,))  # fmt: skip
        return replace(one, gold=text, prompt=text, tags={text: text}, origin=text, cluster=text,
                       score=score)  # fmt: skip

    return [filled(one) for one in (
        *pair(0, 0.0, 1.0, task=text, feedback=text, step=1), spoken(talk),
        *pair(0, 0.0, 1.0, task="rooms", feedback=text, step=2), episode(7, None, text=text),
    )]  # fmt: skip


def make_run(run: Path, text: str) -> Summary:
    made = records(text)
    write_records(run, made)
    summary = summarise(made, command=text, model=text, protocol=text, seconds=1.0, cost=None,
                        scale={text: (0.0, 1.0)})  # fmt: skip
    (run / "summary.json").write_text(json.dumps({
        **summary.to_json(), "suite": text, "provenance": {"dates": {"started": text}, text: text},
    }))  # fmt: skip
    lines = [{"step": n, "reward/draft": n / 3, f"reward/draft/{text}": 0.5, "gap/loo": 0.1,
              f"eval/{text}": n / 4} for n in range(3)]  # fmt: skip
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (run / "config.yaml").write_text(json.dumps({"model": text, "tasks": {text: 1.0}}))
    (run / "environment.json").write_text(json.dumps({"python": text, "packages": {text: text}}))
    return summary


def attack(name: str, command: Iterable[str], make: Callable[[Path], object], run: str) -> Attack:
    words = [str(Path("input", run)) if word == "RUN" else word for word in command]

    def prepare(folder: Path) -> None:
        (folder / "input").mkdir()
        make(folder / "input" / run)

    return Attack(name, words, prepare, after=page_faults)


def path_name(text: str) -> str:
    """The text as the name of a folder, as far as Linux permits."""
    kept = text.replace("/", "⁄").replace("\0", "").encode("utf-8", "ignore")[:120]
    return kept.decode("utf-8", "ignore").strip(". ") or "run"


@pytest.mark.parametrize("part", seeds(14))
def test_runs_of_hostile_text(attack_all: Run, part: int) -> None:
    """Every text on four of the pages, tables and exports, as content and as a folder's name."""
    names = [*TEXTS][part::14]
    attack_all(
        attack("undamaged", PAGES[0], partial(make_run, text="plain"), "run"),
        (
            attack(name, PAGES[(part + 4 * n + more) % len(PAGES)],
                   partial(make_run, text=TEXTS[name]), path_name(TEXTS[name]))
            for n, name in enumerate(names[: None if part else 1]) for more in range(4)
        ),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["script", *(
    pytest.param(n, marks=pytest.mark.hostile) for n in TEXTS if n != "script"
)])  # fmt: skip
def test_cells_of_a_notebook(tmp_path: Path, name: str) -> None:
    run = tmp_path / path_name(TEXTS[name])
    run.mkdir()
    result = EvaluationResult.of(make_run(run, TEXTS[name]), run)
    # The policy is part of a page's head, and a cell has none.
    assert html_faults(result._repr_html_()) == ["no policy against other content"]


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """The JSON value with these texts replaced wherever they are a key or a whole value."""
    if isinstance(value, dict):
        return {names.get(key, key): renamed(part, names) for key, part in value.items()}
    if isinstance(value, list):
        return [renamed(part, names) for part in value]
    return names.get(value, value) if isinstance(value, str) else value


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for part in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from texts_in(part)
    elif isinstance(value, str):
        yield value


def rename(source: Path, run: Path, text: str, rng: random.Random) -> None:
    """Copy a run in which a random third of all its texts ends with the hostile text."""
    copy_run(source, run)
    files = sorted([*run.glob("*.json"), *run.glob("*.jsonl")])
    lines = {
        file: [json.loads(line) for line in file.read_text().splitlines()]
        if file.suffix == ".jsonl"
        else json.loads(file.read_text())
        for file in files
    }
    everything = sorted({one for value in lines.values() for one in texts_in(value)})
    names = {one: f"{one}{text}" for one in everything if rng.random() < 0.3}
    for file, value in lines.items():
        changed = renamed(value, names)
        many = isinstance(changed, list) and file.suffix == ".jsonl"
        file.write_text("\n".join(map(json.dumps, changed)) + "\n" if many else json.dumps(changed))


@pytest.mark.hostile
@pytest.mark.parametrize("seed", range(8))
def test_real_runs_with_hostile_names(attack_all: Run, evaluations: Path, seed: int) -> None:
    """Names that occur in several files change in all of them, so that the files still agree."""
    rng = seeded(seed)
    commands = (*PAGES, ("judge", "sheet", "RUN", "--out", "sheet"), ("certify", "RUN"),
                ("compare", str(evaluations / "b"), "RUN", "--force-mixed"),
                ("report", "RUN", "--format", "eee", "--out", "eee"))  # fmt: skip
    short = [name for name, text in TEXTS.items() if len(text) < 20_000]
    attack_all(
        attack("undamaged", PAGES[0], lambda run: copy_run(evaluations / "a", run), "run"),
        (
            attack(name, rng.choice(commands), partial(
                rename, evaluations / "a", text=TEXTS[name], rng=seeded(f"{seed}{name}")
            ), "run")
            for name in rng.sample(short, 8)
        ),
    )  # fmt: skip


def make_people(run: Path, text: str) -> None:
    near, learnt = closeness(20, 60), memory(20, 60)
    for model in near["models"]:
        model["name"] = model["lines"][0]["label"] = model["lines"][1]["name"] = text
    learnt["model"] = text
    built = road() | {"left_out": {text: 1}, "redacted": {text: 2}, "commands": [text]}
    made = measured_run(run.parent, closeness=near, memory=learnt, road=built)
    (made / "certificate.json").write_text(json.dumps({"model": {"weights": text}}))


@pytest.mark.parametrize("part", seeds(6))
def test_pages_about_people(attack_all: Run, part: int) -> None:
    names = [*TEXTS][part::6]
    attack_all(
        attack("undamaged", PAGES[0], partial(make_people, text="plain"), "run"),
        (attack(name, PAGES[n % 3], partial(make_people, text=TEXTS[name]), "run")
         for n, name in enumerate(names[: None if part else 1])),
    )  # fmt: skip


@pytest.mark.parametrize("part", seeds(6))
def test_rows_of_hostile_text(attack_all: Run, part: int) -> None:
    """Columns, values and the name of the file."""
    row = {"data_source": "cast_of_people", "name": "Vera", "job": "teacher", "town": "Turku",
           "pet": "hen", "question": "How are things, Vera?", "kind": "person",
           "ways": "formally weather slowly", "reply": "Greetings! Heard about the rain? Anyway."}  # fmt: skip  # noqa: E501
    commands = (("data", "show", "RUN", "--task", "cast_of_people"), ("data", "check", "RUN"),
                ("data", "dedupe", "RUN", "-o", "out.jsonl"),
                ("data", "split", "RUN", "--by", "name"))  # fmt: skip

    def make(file: Path, text: str) -> None:
        odd = {
            **row,
            **dict.fromkeys(("name", "job", "pet", "question", "reply"), text),
            text: text,
        }
        file.write_text("\n".join(json.dumps(one) for one in (row, odd, {**row, text: [text]})))

    names = [*TEXTS][part::6]
    attack_all(
        attack("undamaged", commands[0], partial(make, text="plain"), "rows.jsonl"),
        (attack(name, (*commands[n % 4], *(("--row", "2") if n % 4 == 0 else ())),
                partial(make, text=TEXTS[name]), f"{path_name(TEXTS[name])}.jsonl")
         for n, name in enumerate(names[: None if part else 1])),
    )  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_pages_of_comparisons(tmp_path: Path, name: str) -> None:
    """Ablations, reproductions, distillations, checkpoints and matrices are written with it."""
    text = TEXTS[name][:20_000]
    grid = Grid(head=(text, "mean", text), rows=(GridRow.of(text, f"0.5 [{text}]", text),),
                title=text, notes=(text,), words=(text,))  # fmt: skip
    panel = Plot(title=text, rows=(text,), dots=(Dot(label=text, row=0, value=0.5),),
                 rules=((text, 0.5),), axis=text)  # fmt: skip
    curves = Plot(title=text, axis=text, curves=(Curve(label=text, steps=(0, 1), values=(0, 1)),))
    charts = [Chart(name="a", title=text, caption=text, panels=(one,)) for one in (panel, curves)]
    page = write_comparison_page(tmp_path / "page.html", title=text, finding=text, grid=grid,
                                 charts=charts, facts=[(text, text)])  # fmt: skip
    assert not html_faults(page.read_text())
    assert not list(markdown_faults(grid_markdown(grid)))
