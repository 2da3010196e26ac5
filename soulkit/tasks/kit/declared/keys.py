"""The keys of a task without code, and how they become an ordinary declaration (`TaskSpec`).

    tasks:
      hints:
        kind: choice
        prompt: |
          {{ situation }} {{ speaker }} says: "{{ words }}"
          What does {{ speaker }} mean?
        options: {columns: [meant, literal, other]}
        gold: meant

`expand` derives what Python tasks state: columns and who may see them, seats, metric, coaches. A
column that the actor's prompt names is for the actor and the coach; one that only the judge's or
the partner's prompt names is for that reader; `gold` is for no reader but the judge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from jinja2 import TemplateError, meta
from jinja2.sandbox import SandboxedEnvironment
from pydantic import BaseModel, ConfigDict, Field

TaskKind = Literal["choice", "text", "judged", "dialogue"]
ACTOR, PARTNER = "actor", "partner"
"""Seats of a task without code."""
PROMPT, SYSTEM, COACH, JUDGE = "prompt", "system", "coach", "judge"
"""Names of the templates of a task without code; the partner's is named like its seat."""
MADE = frozenset({"options", "feedback", "reply", "transcript", "attempt", "reward"})
"""Values of templates that no column holds."""
OPTIONS_BY_LETTER, GOLD_LETTER = "options_by_letter", "gold_letter"
"""Columns that a choice adds to a row: letter → option, and the letter of the gold."""
PROMPT_FILES = (".md", ".txt", ".jinja", ".j2")


class Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Scorer(Keys):
    """One way to score a reply, with its weight in the mean of several."""

    kind: Literal[
        "exact", "normalised", "regex", "contains", "number", "token_f1", "rouge_l", "json_schema"
    ]
    weight: float = Field(default=1.0, gt=0)
    pattern: str = ""
    """`regex`: the pattern; empty: the row's gold is the pattern."""
    tolerance: float = Field(default=0.0, ge=0)
    """`number`: the largest difference that counts as right."""
    json_schema: dict[str, Any] = Field(default_factory=dict)
    """`json_schema`: the schema that the reply must fit."""


class Options(Keys):
    """Where the options of a choice come from: exactly one of the three."""

    texts: tuple[str, ...] = ()
    """The same options in every row."""
    column: str = ""
    """A column with a list of texts, or a mapping of letters to texts."""
    columns: tuple[str, ...] = ()
    """Columns with one option each."""


class RubricDimension(Keys):
    """One dimension of a judge's rubric and its scale."""

    rubric: str
    low: float = 1
    high: float = 5
    weight: float = Field(default=1.0, gt=0)


class JudgeKeys(Keys):
    """How a judge scores the reply, or the whole dialogue."""

    rubric: str = ""
    """What the judge should look at; with `dimensions`, an introduction to them."""
    dimensions: dict[str, RubricDimension] = Field(default_factory=dict)
    """Name → rubric; the score is their weighted mean. Empty: one score from 1 to 10."""
    prompt: str = ""
    """A template for the judge, in place of the shared one."""
    samples: Annotated[int, Field(gt=0)] = 1
    """Number of opinions of each judge."""
    both_orders: bool = False
    """Compare the reply with the gold, in both orders, instead of rating it."""


class DialogueKeys(Keys):
    """The other side of a dialogue, and when it ends."""

    partner: str
    """The partner's prompt."""
    begins: Literal["actor", "partner"] = "partner"
    start: str = "(The conversation begins.)"
    """What the side that begins reads first."""
    turns: Annotated[int, Field(gt=0)] = 10
    """Maximum number of turns of each side."""
    ends: tuple[str, ...] = ()
    """Texts, or `/patterns/`, that end the dialogue when either side says them."""


class Rule(Keys):
    """Feedback without a model: `say` for the first rule whose conditions all hold."""

    when: dict[str, str] = Field(default_factory=dict)
    """Tag or column → its value; `outcome` → right, wrong, unread, or a status."""
    say: str


class FeedbackKeys(Keys):
    """Where feedback comes from."""

    rules: tuple[Rule, ...] = ()
    coach: str = ""
    """The prompt of a model coach, in place of the shared one."""
    critique: bool = False
    """Whether the judge's words are the feedback."""


class Declaration(Keys):
    """The keys of a task without code, besides those of every task."""

    kind: TaskKind
    prompt: str
    """The actor's prompt: a Jinja template, or the path of a file with one."""
    system: str = ""
    """A system message before the prompt."""
    gold: str = ""
    """The column with the right answer."""
    answer: str = ""
    """Where the answer is in a reply: `tag` (`<answer>`), `reply` (the whole reply) or a pattern
    with one group. Default: `tag` for a choice, `reply` for texts."""
    options: Options = Options()
    orders: Annotated[int, Field(gt=0)] = 1
    """In how many orders the options of a row are presented."""
    scorer: tuple[Scorer, ...] = ()
    judge: JudgeKeys | None = None
    dialogue: DialogueKeys | None = None
    rules: FeedbackKeys = FeedbackKeys()
    """The keys of `feedback:` that only tasks without code have."""
    macro: str = ""
    """A tag: the headline is the mean over its values, each with equal weight."""

    def templates(self) -> dict[str, str]:
        """Template name → text; without empty ones."""
        texts = {
            PROMPT: self.prompt,
            SYSTEM: self.system,
            COACH: self.rules.coach,
            JUDGE: self.judge.prompt if self.judge else "",
            PARTNER: self.dialogue.partner if self.dialogue else "",
        }
        return {name: text for name, text in texts.items() if text}


DECLARATION_KEYS = frozenset(Declaration.model_fields) - {"rules"}
FEEDBACK_KEYS = frozenset(FeedbackKeys.model_fields)


def template_names(text: str) -> frozenset[str]:
    """The values that a template names; empty for an invalid template (reported elsewhere)."""
    try:
        return frozenset(meta.find_undeclared_variables(SandboxedEnvironment().parse(text)))
    except TemplateError:
        return frozenset()


def expand(entry: Mapping[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """The entry of a task without code as that of an ordinary task, with its keys under
    `declaration`. Values of a wrong type are left for the validation that follows."""
    keys = {key: value for key, value in entry.items() if key in DECLARATION_KEYS}
    rest = {key: value for key, value in entry.items() if key not in DECLARATION_KEYS}
    feedback = rest.get("feedback")
    if isinstance(feedback, Mapping):
        keys["rules"] = {k: v for k, v in feedback.items() if k in FEEDBACK_KEYS}
        rest["feedback"] = {k: v for k, v in feedback.items() if k not in FEEDBACK_KEYS}
    keys = _with_files(_in_full(keys), folder)
    try:
        declaration = Declaration.model_validate(keys)
    except ValueError:
        return {**rest, "declaration": keys}
    return {**_defaults(declaration, name, rest), **rest, "declaration": keys,
            "columns": _columns(declaration, rest)}  # fmt: skip


def _in_full(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Short forms in full: one scorer for a list, a column's name or texts for `options`."""
    full = dict(keys)
    options, scorer = keys.get("options"), keys.get("scorer")
    if isinstance(options, str):
        full["options"] = {"column": options}
    elif isinstance(options, list):
        full["options"] = {"texts": [str(text) for text in options]}
    if scorer is not None:
        scorers = scorer if isinstance(scorer, list) else [scorer]
        full["scorer"] = [{"kind": one} if isinstance(one, str) else one for one in scorers]
    return full


def _with_files(keys: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Prompts that name a file, replaced by its text."""

    def text_of(value: Any) -> Any:
        named = isinstance(value, str) and "\n" not in value and value.endswith(PROMPT_FILES)
        return (folder / value).read_text(encoding="utf-8") if named else value

    for key, inner in (("prompt", ""), ("system", ""), ("judge", "prompt"),
                       ("dialogue", "partner"), ("rules", "coach")):  # fmt: skip
        value = keys.get(key)
        if inner and isinstance(value, Mapping) and inner in value:
            keys[key] = {**value, inner: text_of(value[inner])}
        elif not inner and value is not None:
            keys[key] = text_of(value)
    return keys


def _defaults(keys: Declaration, name: str, rest: Mapping[str, Any]) -> dict[str, Any]:
    """What an ordinary declaration has to state."""
    judged = keys.judge is not None
    right_or_wrong = keys.kind == "choice" or (
        keys.kind == "text" and all(s.kind not in ("token_f1", "rouge_l") for s in keys.scorer)
    )
    words = "accuracy" if right_or_wrong else "score"
    coaches = ["model"] if judged or keys.rules.coach else []
    coaches += ["symbolic"] if keys.rules.rules or not judged else []
    seats = {ACTOR: "actor"} | ({PARTNER: "partner"} if keys.dialogue else {})
    defaults: dict[str, Any] = {
        "title": name, "summary": f"A task without code, of the kind {keys.kind}.", "seats": seats,
        "metric": {"name": words, "binary": right_or_wrong and len(keys.scorer) < 2},
    }  # fmt: skip
    if "feedback" not in rest:
        defaults["feedback"] = {"coaches": coaches}
    return defaults


def _columns(keys: Declaration, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Column → its declaration: derived from the templates, changed by the entry's `columns`."""
    readers: dict[str, list[str]] = {}
    for name, reader in _readers(keys):
        readers.setdefault(name, [])
        readers[name] += [reader] if reader and reader not in readers[name] else []
    for name in _extra(keys, rest):
        readers.setdefault(name, [])
    columns: dict[str, Any] = {
        name: {"type": "any", "audience": audience} for name, audience in readers.items()
    }
    if keys.kind == "choice":
        computed = {"type": "any", "required": False, "identity": False}
        columns[OPTIONS_BY_LETTER] = {**computed, "audience": [ACTOR, "coach"]}
        columns[GOLD_LETTER] = {**computed, "audience": ["gold"]}
    changes = rest.get("columns")
    for name, change in changes.items() if isinstance(changes, Mapping) else ():
        change = {"aliases": [change]} if isinstance(change, str) else change
        usual = columns.get(name, {"type": "any", "audience": ["judge"], "required": False})
        columns[name] = {**usual, **change} if isinstance(change, Mapping) else change
    return columns


def _readers(keys: Declaration) -> Iterator[tuple[str, str]]:
    """(column, reader) of every column that a template, the options or the gold names."""
    seats = {PROMPT: ACTOR, SYSTEM: ACTOR, PARTNER: PARTNER, COACH: "coach", JUDGE: "judge"}
    for template, text in keys.templates().items():
        for name in sorted(template_names(text) - MADE):
            yield name, seats[template]
            if seats[template] == ACTOR:
                yield name, "coach"
    for name in (keys.options.column, *keys.options.columns):
        yield from ((name, ACTOR), (name, "coach")) if name else ()
    if keys.gold and keys.gold not in keys.options.columns:
        yield keys.gold, "gold"


def _extra(keys: Declaration, rest: Mapping[str, Any]) -> Iterable[str]:
    """Columns that only clusters, tags and the person name."""
    tags = rest.get("tags")
    yield from map(str, tags.values()) if isinstance(tags, Mapping) else ()
    cluster = rest.get("cluster")
    yield from map(str, cluster) if isinstance(cluster, list) else ()
    if isinstance(rest.get("person"), str):
        yield str(rest["person"])
