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

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.sandbox import SandboxedEnvironment
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from soulkit.data.rows import Texts
from soulkit.parse import PATTERN_ERRORS, YAML_BYTES, ParseError, decoded, read_limited
from soulkit.tasks.kit.declared.problems import Misfit, Problem, misfits
from soulkit.tasks.kit.prompting import WITHOUT_CONSTANTS
from soulkit.text import one_line

TaskKind = Literal["choice", "text", "judged", "dialogue"]
ACTOR, PARTNER = "actor", "partner"
"""Seats of a task without code."""
PROMPT, SYSTEM, COACH, JUDGE = "prompt", "system", "coach", "judge"
"""Names of the templates of a task without code; the partner's is named like its seat."""
MADE: Mapping[str, frozenset[str]] = {
    PROMPT: frozenset({"feedback"}), SYSTEM: frozenset({"feedback"}),
    PARTNER: frozenset(), COACH: frozenset({"task_prompt", "attempt", "reward", "remarks"}),
    JUDGE: frozenset({"task_prompt", "reply", "transcript", "gold", "other_columns", "scales",
                      "a", "b"}),
}  # fmt: skip
"""Template → its values that no column holds; a choice also has `options`."""
OPTIONS_BY_LETTER, GOLD_LETTER = "options_by_letter", "gold_letter"
"""Columns that a choice adds to a row: letter → option, and the letter of the gold."""
OPTION_ORDER = "option_order"
"""With `orders`: the letters of the row's own order, in the order shown."""
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Letters of options."""
GRADED = ("token_f1", "rouge_l")
"""Scorers with values between 0 and 1."""
PROMPT_FILES = (".md", ".txt", ".jinja", ".j2")


class Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _template(value: Any, info: ValidationInfo) -> Any:
    """A prompt, read from the file that it names; Misfit if it is not valid Jinja."""
    if not isinstance(value, str):
        return value
    where = ""
    if "\n" not in value and value.endswith(PROMPT_FILES):
        where = f"{value}: "
        try:
            file = (info.context or {}).get("folder", Path()) / value
            value = decoded(read_limited(file, YAML_BYTES))
        except (OSError, ParseError) as error:
            why = f"{where}this prompt file cannot be read; expected a text file"
            raise Misfit(Problem((), why)) from error
    why, line = _jinja_fault(value)
    if why:
        raise Misfit(Problem((), f"{where}not valid Jinja{why}", 0 if where else line))
    return value


def _jinja_fault(text: str) -> tuple[str, int]:
    """What is wrong with a template, and its line; ("", 0) if nothing."""
    environment = SandboxedEnvironment(**WITHOUT_CONSTANTS)
    try:
        # Jinja computes this block's value while compiling, without limits.
        if block := environment.parse(text).find(nodes.EvalContextModifier):
            why = "autoescape is for HTML, and a prompt is plain text"
            return f" in line {block.lineno}: {why}", block.lineno
        environment.compile(text)
    except TemplateSyntaxError as error:
        return f" in line {error.lineno}: {error.message}", error.lineno
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f": {type(error).__name__}: {one_line(str(error), 200)}", 0
    return "", 0


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str | Mapping) else value


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except PATTERN_ERRORS as error:
        raise Misfit(Problem((), f"not a valid pattern: {error}")) from error
    return value


Template = Annotated[str, BeforeValidator(_template)]
Pattern = Annotated[str, AfterValidator(_pattern)]


class Scorer(Keys):
    """One way to score a reply, with its weight in the mean of several."""

    kind: Literal[
        "exact", "normalised", "regex", "contains", "number", "token_f1", "rouge_l", "json_schema"
    ]
    weight: float = Field(default=1.0, gt=0)
    pattern: Pattern = ""
    """`regex`: the pattern; empty: the row's gold is the pattern."""
    tolerance: float = Field(default=0.0, ge=0)
    """`number`: the largest difference that counts as right."""
    json_schema: dict[str, Any] = Field(default_factory=dict)
    """`json_schema`: the schema that the reply must fit."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, entry: Any) -> Any:
        return {"kind": entry} if isinstance(entry, str) else entry

    @model_validator(mode="after")
    def _keys_fit(self) -> Self:
        homes = {"pattern": "regex", "tolerance": "number", "json_schema": "json_schema"}
        strays = [key for key in homes if key in self.model_fields_set and homes[key] != self.kind]
        if strays:
            raise Misfit(
                *(Problem((k,), f"this key needs the scorer '{homes[k]}'") for k in strays)
            )
        if self.kind == "json_schema" and not self.json_schema:
            raise Misfit(Problem((), "the key 'json_schema' is missing"))
        return self

    @property
    def needs_gold(self) -> bool:
        return not (self.pattern or self.json_schema)


class Options(Keys):
    """Where the options of a choice come from: exactly one of the three."""

    texts: tuple[str, ...] = ()
    """The same options in every row."""
    column: str = ""
    """A column with a list of texts, a mapping of letters to texts, or lists `text` and `label`."""
    columns: tuple[str, ...] = ()
    """Columns with one option each. Their order is drawn for each row, unless the prompt names
    them."""

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, entry: Any) -> Any:
        if isinstance(entry, str | list):
            return {"column" if isinstance(entry, str) else "texts": entry}
        return entry


class RubricDimension(Keys):
    """One dimension of a judge's rubric and its scale."""

    rubric: Template
    low: int = 1
    high: int = 5
    weight: float = Field(default=1.0, gt=0)


def _as_rubric(entry: Any) -> Any:
    return {"rubric": entry} if isinstance(entry, str) else entry


DimensionName = Annotated[str, Field(pattern=r"^[^\W\d_]\w{0,39}$")]


class JudgeKeys(Keys):
    """How a judge scores the reply, or the whole dialogue. Rubrics may name columns."""

    rubric: Template = ""
    """What the judge should look at; with `dimensions`, an introduction to them."""
    dimensions: dict[DimensionName, Annotated[RubricDimension, BeforeValidator(_as_rubric)]] = (
        Field(default_factory=dict)
    )
    """Name → rubric; the score is their weighted mean. Empty: one score from 1 to 10."""
    prompt: Template = ""
    """A template for the judge, in place of the shared one."""
    samples: Annotated[int, Field(gt=0)] = 1
    """Number of opinions of each judge."""
    both_orders: bool = False
    """Compare the reply with the gold, in both orders, instead of rating it."""

    @property
    def scales(self) -> Mapping[str, RubricDimension]:
        """Name → dimension; a single score has the name ""."""
        return self.dimensions or {"": RubricDimension(rubric=self.rubric, low=1, high=10)}


class DialogueKeys(Keys):
    """The other side of a dialogue, and when it ends."""

    partner: Template
    """The partner's prompt."""
    begins: Literal["actor", "partner"] = "partner"
    start: str = "(The conversation begins.)"
    """What the side that begins reads first."""
    turns: Annotated[int, Field(gt=0, le=1000)] = 10
    """Maximum number of turns of each side."""
    ends: Texts = ()
    """Texts, or `/patterns/`, that end the dialogue when either side says them."""


class Rule(Keys):
    """Feedback without a model: `say` for the first rule whose conditions all hold."""

    when: dict[str, str] = Field(default_factory=dict)
    """Tag or column → its value; `outcome` → right, wrong, high, low, unread, none or a status;
    dimension of the judge → high or low."""
    say: str


class FeedbackKeys(Keys):
    """Where feedback comes from."""

    rules: tuple[Rule, ...] = ()
    coach: Template = ""
    """The prompt of a model coach, in place of the shared one."""
    critique: bool = False
    """Whether the judge's words are the feedback where no rule applies and no coach is named."""


class Declaration(Keys):
    """The keys of a task without code, besides those of every task."""

    kind: TaskKind
    prompt: Template
    """The actor's prompt: a Jinja template, or the path of a file with one."""
    system: Template = ""
    """A system message before the prompt."""
    gold: str = ""
    """The column with the right answer."""
    answer: Pattern = ""
    """Where the answer is in a reply: `tag` (`<answer>`), `reply` (the whole reply) or a pattern
    with one group. Default: `tag` for a choice, `reply` for texts."""
    options: Options = Options()
    orders: Annotated[int, Field(gt=0, le=1000)] = 1
    """In how many orders the options of a row are presented; every option stands in every place."""
    scorer: Annotated[tuple[Scorer, ...], BeforeValidator(_one_or_more)] = ()
    judge: Annotated[JudgeKeys | None, BeforeValidator(_as_rubric)] = None
    dialogue: DialogueKeys | None = None
    feedback: FeedbackKeys = FeedbackKeys()
    """The keys of `feedback:` that only tasks without code have."""
    macro: str = ""
    """A tag or column: the headline is the mean over its values, each with equal weight."""
    limits: dict[str, Annotated[int, Field(gt=0)]] = Field(default_factory=dict)
    """Column → the largest number of its words that prompts show."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if problems := [*self._problems()]:
            raise Misfit(*problems)
        return self

    def _problems(self) -> Iterator[Problem]:
        required, others = KIND_KEYS[self.kind]
        special = {key for keys in KIND_KEYS.values() for part in keys for key in part}
        for key in sorted(self.model_fields_set & special - {*required, *others}):
            kinds = " or ".join(kind for kind, keys in KIND_KEYS.items() if key in sum(keys, ()))
            yield Problem((key,), f"this key needs another kind: {kinds}")
        for key in sorted({*required} - self.model_fields_set):
            yield Problem((), f"the key '{key}' is missing")
        sizes = [len(self.options.texts), 2 * bool(self.options.column), len(self.options.columns)]
        if "options" in required and (sum(map(bool, sizes)) != 1 or max(sizes) < 2):
            yield Problem(("options",), "expected two or more texts, a column, or columns: [a, b]")
        if self.fixes_order and self.orders > 1:
            yield Problem(("orders",), "the prompt names the options' columns; write {{ options }}")
        if self.answer not in ("", "tag", "reply") and re.compile(self.answer).groups != 1:
            yield Problem(("answer",), "expected tag, reply, or a pattern with one group (...)")
        golden = not self.scorer or any(scorer.needs_gold for scorer in self.scorer)
        if self.kind == "text" and golden and not self.gold:
            yield Problem((), "the key 'gold' is missing")
        for name, spot in {PROMPT: [PROMPT], SYSTEM: [SYSTEM], COACH: ["feedback", COACH]}.items():
            text = self.templates().get(name, "")
            if self.gold in template_names(text):
                line = next(n for n, part in enumerate(text.splitlines(), 1) if self.gold in part)
                why = f"the {name} names '{self.gold}', the column with the gold; leave it out"
                yield Problem((*spot,), why, line)
        yield from self._judging_problems()

    def _judging_problems(self) -> Iterator[Problem]:
        judge, pairs = self.judge, self.judge is not None and self.judge.both_orders
        for name, one in judge.dimensions.items() if judge else ():
            if one.low >= one.high:
                spot = ("judge", "dimensions", name)
                yield Problem(spot, f"low is {one.low} and high {one.high}; expected low < high")
        if pairs and (not self.gold or self.dialogue or (judge and judge.dimensions)):
            why = "needs 'gold' and the kind judged, and no 'dimensions': it compares two replies"
            yield Problem(("judge", "both_orders"), why)
        if self.feedback.critique and (pairs or not judge):
            yield Problem(("feedback", "critique"), "needs a judge that rates, for its words")
        if self.dialogue and not judge and not self.gold:
            yield Problem((), "a dialogue needs 'judge', or 'gold' for the actor's last line")
        if self.dialogue and self.system:
            yield Problem(("system",), "in a dialogue the 'prompt' is the system message")

    def templates(self) -> dict[str, str]:
        """Template name → text; without empty ones."""
        texts = {
            PROMPT: self.prompt,
            SYSTEM: self.system,
            COACH: self.feedback.coach,
            JUDGE: self.judge.prompt if self.judge else "",
            PARTNER: self.dialogue.partner if self.dialogue else "",
        }
        return {name: text for name, text in texts.items() if text}

    @property
    def fixes_order(self) -> bool:
        """Whether the prompt names the columns of the options, and so shows them in their order."""
        shown = {self.options.column, *self.options.columns} - {"", "options"}
        return bool(shown) and shown <= template_names(self.prompt + self.system)

    @property
    def scoring(self) -> dict[str, Any]:
        """The keys that change the score of a reply."""
        keys = {"answer", "options", "orders", "scorer", "judge", "dialogue", "macro"}
        return self.model_dump(include=keys)


KIND_KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "choice": (("options", "gold"), ("orders", "answer")),
    "text": ((), ("gold", "scorer", "answer")),
    "judged": (("judge",), ("gold", "answer")),
    "dialogue": (("dialogue",), ("judge", "gold", "scorer", "answer")),
}
"""Kind → the keys that it needs, besides `prompt`, and others that only some kinds have."""
DECLARATION_KEYS = frozenset(Declaration.model_fields) - {"feedback"}
FEEDBACK_KEYS = frozenset(FeedbackKeys.model_fields)


def template_names(text: str) -> frozenset[str]:
    """The values that a template names; empty for an invalid template (reported elsewhere)."""
    if _jinja_fault(text)[0]:
        return frozenset()
    environment = SandboxedEnvironment(**WITHOUT_CONSTANTS)
    names = meta.TrackingCodeGenerator(environment)
    names.optimizer = None
    names.visit(environment.parse(text))
    return frozenset(names.undeclared_identifiers)


def expand(
    entry: Mapping[str, Any], name: str, folder: Path, problems: list[Problem]
) -> dict[str, Any]:
    """The entry of a task without code as that of an ordinary task, with its keys under
    `declaration`. What is wrong with these keys joins `problems`; the others stay as they are."""
    keys = {key: value for key, value in entry.items() if key in DECLARATION_KEYS}
    rest = {key: value for key, value in entry.items() if key not in DECLARATION_KEYS}
    feedback = entry.get("feedback", {})
    if isinstance(feedback, Mapping):
        keys["feedback"] = {k: v for k, v in feedback.items() if k in FEEDBACK_KEYS}
        rest["feedback"] = {k: v for k, v in feedback.items() if k not in FEEDBACK_KEYS}
    try:
        declaration = Declaration.model_validate(keys, context={"folder": folder})
    except ValidationError as error:
        problems += misfits(error, entry, ("tasks", name))
        declaration = Declaration.model_construct(kind="text", prompt="")  # to check the others
    usual, tags = _defaults(declaration, name), rest.get("tags", {})
    tags = {str(tag): tag for tag in tags} if isinstance(tags, list) else tags
    macro = declaration.macro
    rest["tags"] = _over({macro: macro} if macro else {}, tags)
    rest["metric"] = _over(usual["metric"], rest.get("metric", {}), "name")
    rest["feedback"] = _over(usual["feedback"], rest.get("feedback", {}))
    columns = _columns(declaration, rest)
    return {**usual, **rest, "columns": columns, "declaration": declaration}


def _over(usual: Mapping[str, Any], changes: Any, short: str = "") -> Any:
    """The usual values with changes; a text changes `short`. Other types are left to validation."""
    changes = {short: changes} if short and isinstance(changes, str) else changes
    return {**usual, **changes} if isinstance(changes, Mapping) else changes


def _defaults(keys: Declaration, name: str) -> dict[str, Any]:
    """What an ordinary declaration has to state."""
    judge, talk, rules = keys.judge, keys.dialogue, keys.feedback
    right_or_wrong = judge is None and all(s.kind not in GRADED for s in keys.scorer)
    metric: dict[str, Any] = {
        "name": "accuracy" if right_or_wrong else "score", "scales": {},
        "binary": right_or_wrong and len(keys.scorer) < 2,
        "headline": f"macro_{keys.macro}" if keys.macro else "row_accuracy" * (keys.orders > 1),
    }  # fmt: skip
    by_rules = judge and (rules.rules or rules.critique) and not rules.coach
    usual: dict[str, Any] = {
        "title": name, "summary": f"A task without code, of the kind {keys.kind}.",
        "seats": {ACTOR: "actor"} | ({PARTNER: "partner"} if talk else {}), "metric": metric,
        "feedback": {"coaches": ["symbolic"] if by_rules else ["symbolic", "model"]},
    }  # fmt: skip
    if judge is not None:
        asked = ("pairwise_first", "pairwise_second") if judge.both_orders else ("score",)
        usual["samples"] = dict.fromkeys(asked, judge.samples)
        metric["scales"] = {name: (one.low, one.high) for name, one in judge.dimensions.items()}
        metric["beside"] = list(judge.dimensions)
    if talk is not None:
        usual["options"] = {"max_turns": talk.turns}
        metric["scales"]["turns"] = (0, talk.turns)
    return usual


def _columns(keys: Declaration, rest: Mapping[str, Any]) -> Any:
    """Column → its declaration: derived from the templates, changed by the entry's `columns`."""
    readers: dict[str, list[str]] = {}
    for name, reader in _readers(keys):
        readers.setdefault(name, [])
        readers[name] += [reader] if reader and reader not in readers[name] else []
    for value in (rest["tags"], rest.get("cluster"), rest.get("person")):
        named = value if isinstance(value, list) else [value]
        for one in value.values() if isinstance(value, Mapping) else named:
            readers |= {} if not isinstance(one, str) or one in readers else {one: ["judge"]}
    columns: dict[str, Any] = {
        name: {"type": "any", "audience": audience} for name, audience in readers.items()
    }
    if keys.kind == "choice":
        computed = {"type": "any", "required": False, "identity": False}
        columns[OPTIONS_BY_LETTER] = {**computed, "audience": [ACTOR, "coach"]}
        columns[GOLD_LETTER] = {**computed, "audience": ["gold"]}
        columns[OPTION_ORDER] = {**computed, "audience": []}
    unnamed = {"type": "any", "audience": ["judge"], "required": False}
    for name, words in keys.limits.items():
        columns[name] = {**columns.get(name, unnamed), "max_words": words}
    changes = rest.get("columns", {})
    if not isinstance(changes, Mapping):
        return changes
    return columns | {
        name: _over(columns.get(name, unnamed), change, "aliases")
        for name, change in changes.items()
    }


def _readers(keys: Declaration) -> Iterator[tuple[str, str]]:
    """(column, reader) of every column that a template, the options or the gold names."""
    seats = {PROMPT: ACTOR, SYSTEM: ACTOR, PARTNER: PARTNER, COACH: "coach", JUDGE: "judge"}
    scales = keys.judge.scales.values() if keys.judge else ()
    rubrics = "".join([keys.judge.rubric if keys.judge else "", *(one.rubric for one in scales)])
    for template, text in (*keys.templates().items(), (JUDGE, rubrics)):
        made = MADE[template] | ({"options"} if keys.kind == "choice" else set())
        for name in sorted(template_names(text) - made):
            yield name, seats[template]
            if seats[template] == ACTOR:
                yield name, "coach"
    for name in (keys.options.column, *keys.options.columns):
        yield from ((name, ACTOR), (name, "coach")) if name else ()
    if keys.gold and keys.gold not in keys.options.columns:
        yield keys.gold, "gold"
