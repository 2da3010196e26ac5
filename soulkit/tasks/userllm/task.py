"""UserLLM: does a model that plays the user of an assistant stay in role? Scored by source:

* `commonsense_qa`: the user asks a quiz question and must not answer it.
  {"intent": "where do people keep money", "choices": ["bank", "river"]}
* `natural_questions`: the assistant proposed something else; a judge decides whether the user kept
  to the question. {"question": ..., "assistant_suggestion_turn": "How about its acoustics?"}
* `prism`: the mean of the applicable parts: 1 − intent overlap, right termination, a detector of
  machine-written text and, in training, novelty. {"conversation_history": ..., "is_last_turn": ...}

The headline is `macro_source`, the mean of the three. The detector is the judge, or a service
(`options: {detector: url, ...}`, models/detector.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from soulkit.data.literals import structure
from soulkit.data.rows import ColumnsError
from soulkit.errors import ConfigError, RowError, did_you_mean
from soulkit.judge.leaks import LeakView
from soulkit.judge.panel import judge_call, mean_agreement, opinions, pooled, verdicts_of
from soulkit.judge.structured import JudgeQuestion, label_question
from soulkit.judge.verdict import fence
from soulkit.models.api.detector import Detector
from soulkit.models.base import Cast
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.coaching import first_safe_lesson
from soulkit.tasks.kit.prompting import Texts, keep_latest
from soulkit.tasks.kit.scoring import actor_status, reply_failure
from soulkit.tasks.userllm.fields import (
    CSQA,
    END,
    NQ,
    PRISM,
    SOURCES,
    UserMessage,
    extract_choices,
    extract_intent,
    read_conversation,
    read_reply,
    read_source,
    to_optional_bool,
)
from soulkit.tasks.userllm.metrics import (
    choices_named,
    intent_overlap,
    paper_batch,
    prism_parts,
    prism_value,
    role_adherence,
    with_novelty,
)
from soulkit.types import (
    BatchMetric,
    Episode,
    Example,
    Failure,
    Record,
    Role,
    Score,
    Verdict,
    unscored,
)

LABELS = {NQ: ("REFUSED", "ACCEPTED"), PRISM: ("HUMAN", "AI")}
"""Judged source → (right label, other label)."""
PURPOSES = {NQ: "intent", PRISM: "detector"}
LabelScore = tuple[float, tuple[Verdict, ...], dict[str, float | None]]
"""A judge's or detector's number in [0, 1], its verdicts, and additional metrics."""


class UserLLM(ChoiceTask):
    def keep_options(self, options: Mapping[str, Any]) -> None:
        self.detector = detector_of(self.name, options)

    # -- rows ---------------------------------------------------------------------------------

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        conversation = read_conversation(fields["conversation_history"])
        wishes = (turn["text"] for turn in conversation or () if turn["speaker"] == "user")
        read = {
            **fields,
            "source": read_source(fields["source"]),
            "intent": extract_intent(fields) or next(wishes, ""),
            "intent_summary": None,
            "opening_prompt": _stripped(fields["opening_prompt"]),
            "question": _stripped(fields["question"]),
            "assistant_suggestion_turn": _stripped(fields["assistant_suggestion_turn"]),
            "conversation_history": conversation or (),
            "choices": extract_choices(self._unpacked(fields["choices"])) or None,
            "is_last_turn": to_optional_bool(fields["is_last_turn"]),
        }
        return self.check(read, conversation)

    def _unpacked(self, choices: Any) -> Any:
        """The choices, also from a Python literal."""
        return structure(choices)

    def check(self, fields: dict[str, Any], conversation: Any) -> dict[str, Any]:
        """The fields; DataError for a row that cannot be scored."""
        return _checked(fields, conversation)

    def tags(self, fields: Mapping[str, Any]) -> dict[str, str]:
        later, last = bool(fields["conversation_history"]), fields["is_last_turn"]
        sure = later and last is not None and fields["source"] == PRISM
        ends = {"last": "yes" if last else "no"} if sure else {}
        return {**super().tags(fields), "turn": "later" if later else "first", **ends}

    def within_budget(self, view: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
        fitted, cuts = super().within_budget(view)
        name = "conversation_history"
        turns = tuple(view.get(name) or ())
        texts, cut = keep_latest([t["text"] for t in turns], self.spec.columns[name].max_words)
        if not cut:
            return fitted, cuts
        speakers = [turn["speaker"] for turn in turns][len(turns) - len(texts) :]
        shown = [{"speaker": s, "text": t} for s, t in zip(speakers, texts, strict=True)]
        return {**fitted, name: tuple(shown)}, {**cuts, name: cut}

    def calls(self, example: Example) -> dict[Role, int]:
        source = example.fields["source"]
        judged = source == NQ or (source == PRISM and self.detector is None)
        return {"actor": 1, "judge": 1} if judged else {"actor": 1}

    # -- scoring ------------------------------------------------------------------------------

    def parse(self, text: str) -> tuple[str, str]:
        message = read_reply(text, self.protocol)
        return message.output, "ok" if message.output else "empty"

    def grade(self, example: Example, answer: str) -> float:
        """The rule-based part of the score: role adherence."""
        return role_adherence(example.fields["choices"] or (), answer, self.protocol)

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        if episode.failure is not None:
            return unscored(episode.failure, self.protocol)
        assert episode.final is not None
        if reply_failure(episode.final, self.strict_endings):  # nothing for a judge to rate
            return self._silent(example, episode, read_reply("", self.protocol))
        message = read_reply(episode.final.text, self.protocol)
        return await self.rated(example, episode, message, cast)

    async def rated(
        self, example: Example, episode: Episode, message: UserMessage, cast: Cast
    ) -> Score:
        """The score of a message, computed as its row's source requires."""
        source = example.fields["source"]
        later = source == PRISM and example.fields["conversation_history"]
        if not message.text and not (message.ended and later):
            return self._silent(example, episode, message)
        if source == CSQA:
            return self._role(example, message)
        if source == NQ:
            return await self._intent(example, episode, message, cast)
        return await self._prism(example, episode, message, cast)

    def _silent(self, example: Example, episode: Episode, message: UserMessage) -> Score:
        assert episode.final is not None
        source, low = example.fields["source"], self.spec.metric.low
        metrics: dict[str, float | None] = {"role_adherence": low}
        if source == NQ:
            metrics = {"intent_adherence": low}
        elif source == PRISM:
            metrics = self._parts(example, message) | {"ai_detector": None}
        return self._scored(
            low, metrics, status=actor_status(episode.final, "empty", self.strict_endings)
        )

    def _role(self, example: Example, message: UserMessage) -> Score:
        choices = example.fields["choices"]
        value = role_adherence(choices, message.text, "paper")
        named = ", ".join(choices_named(choices, message.text, "paper"))
        return self._scored(value, {"role_adherence": value}, words=named)

    async def _intent(
        self, example: Example, episode: Episode, message: UserMessage, cast: Cast
    ) -> Score:
        value, verdicts, more = await self._judged(example, episode, message.text, cast)
        metrics = {"intent_adherence": value, **more}
        used = self._templates(verdicts)
        return self._scored(value, metrics, verdicts, used, words=verdict_words(verdicts))

    async def _prism(
        self, example: Example, episode: Episode, message: UserMessage, cast: Cast
    ) -> Score:
        parts = self._parts(example, message)
        judgement: LabelScore | None = None
        if message.text:
            judgement = await self._detected(example, episode, message.text, cast)
        human, verdicts, more = judgement or (None, (), {})
        value = prism_value({**parts, "ai_detector": human})
        if value is None:
            missing = (
                "the row does not say whether this is the last turn, and nothing else was said"
            )
            return unscored(Failure("unknown_truth", missing), self.protocol)
        metrics = {**parts, "ai_detector": human, **more}
        used = self._templates(verdicts)
        return self._scored(value, metrics, verdicts, used, words=verdict_words(verdicts))

    def _parts(self, example: Example, message: UserMessage) -> dict[str, float | None]:
        fields = example.fields
        last = fields["is_last_turn"] if fields["conversation_history"] else None
        return prism_parts(fields["intent"], message, last)

    def _scored(
        self, value: float, metrics: Mapping[str, float | None],
        verdicts: tuple[Verdict, ...] = (), templates: tuple[str, ...] = (), **how: str,
    ) -> Score:  # fmt: skip
        templates = (self.template, *templates)
        return self.judged_score(value, metrics, verdicts, templates=templates, **how)

    # -- judges -------------------------------------------------------------------------------

    async def _judged(
        self, example: Example, episode: Episode, text: str, cast: Cast
    ) -> LabelScore:
        """The right label counts 1, the other one 0. CallError if no verdict is readable."""
        right = LABELS[example.fields["source"]][0]
        replies = await opinions(cast, self._question(example, text), episode)
        worth = partial(self._worth, right=right)
        more: dict[str, float | None] = {**mean_agreement([(replies, worth, 0, 1)])}
        return pooled(replies, worth, cast.panel.combine), verdicts_of(replies), more

    def _worth(self, label: str, right: str) -> float:
        return float(label == right)

    def _question(self, example: Example, text: str) -> JudgeQuestion[str]:
        source, view = example.fields["source"], example.visible("judge")
        blocks = {"reply": fence(text, "reply")}
        if source == NQ:
            blocks["question"] = fence(view["question"], "question")
            blocks["suggestion"] = fence(view["assistant_suggestion_turn"], "proposal")
        purpose = PURPOSES[source]
        prompt = self.prompts.render(f"judge_{purpose}", **blocks)
        return self.judge_question(purpose, prompt, source)

    def judge_question(self, purpose: str, prompt: str, source: str) -> JudgeQuestion[str]:
        """The question for one of the source's two labels."""
        return label_question(purpose, prompt, LABELS[source])

    async def _detected(
        self, example: Example, episode: Episode, text: str, cast: Cast
    ) -> LabelScore:
        if self.detector is None:
            return await self._judged(example, episode, text, cast)
        human = await self.detector.human(text, judge_call(episode), cast.ledger)
        verdict = Verdict(judge=self.detector.name, purpose="detector", said={"human": human})
        return human, (verdict,), {}

    def _templates(self, verdicts: Sequence[Verdict]) -> tuple[str, ...]:
        templates = {f"judge_{v.purpose}" for v in verdicts}
        return tuple(templates - ({"judge_detector"} if self.detector is not None else set()))

    # -- feedback -----------------------------------------------------------------------------

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        message = self._message(episode) if score is not None else None
        choices = lesson_choices(example.fields, message, score)
        return first_safe_lesson(choices, self.leak_view(example) or LeakView())

    def _message(self, episode: Episode | None) -> UserMessage | None:
        lines = episode.transcript if episode is not None else ()
        return read_reply(lines[-1].text, self.protocol) if lines else None

    def coach_view(self, example: Example, episode: Episode, score: Score) -> dict[str, Any]:
        view = super().coach_view(example, episode, score)
        return {**view, "notes": message_notes(example.fields, self._message(episode), score)}

    def leak_view(self, example: Example) -> LeakView | None:
        """Feedback must not reveal an answer, the judge's labels, the real user's words, or whether
        to end."""
        fields = example.fields
        public = "\n".join(turn["text"] for turn in fields["conversation_history"])
        if fields["source"] == CSQA:
            return LeakView(fields["intent"], private=fields["choices"], public=public)
        if fields["source"] == NQ:
            return LeakView(fields["intent"], rubric=LABELS[NQ], public=public)
        if not fields["conversation_history"]:
            return LeakView(fields["intent"], reference=fields["opening_prompt"] or "")
        return LeakView(fields["intent"], rubric=(END,), public=public)

    # -- self-checks --------------------------------------------------------------------------

    def gold_completion(self, example: Example) -> str:
        fields = example.fields
        source, choices = fields["source"], fields["choices"] or ()
        if source == NQ:
            return f"no, what i asked was: {fields['question'] or fields['intent']}"
        if source == CSQA:
            texts = (fields["intent"], *TEXTS["silent"])
            quiet = (t for t in texts if not choices_named(choices, t, self.protocol))
            return next(quiet, "; ".join(choices))  # all of them: repeats the question
        return self.gold_message(fields)

    def gold_message(self, fields: Mapping[str, Any]) -> str:
        """A perfect message for a PRISM row."""
        if fields["is_last_turn"] and fields["conversation_history"]:
            return END
        opening = "" if fields["conversation_history"] else fields["opening_prompt"] or ""
        messages = (
            t for t in (opening, *TEXTS["silent"]) if t and not intent_overlap(fields["intent"], t)
        )
        return next(messages, str(TEXTS["silent"][0]))

    def wrong_completion(self, example: Example) -> str | None:
        fields = example.fields
        if fields["source"] == CSQA:
            return f"is it {fields['choices'][0]}" if fields["choices"] else None
        if fields["source"] == NQ:
            return "oh nice, yes, tell me more about that"
        words = fields["intent"]
        return words if fields["is_last_turn"] else f"{words} {END}"

    def gold_text(self, example: Example) -> str:
        fields = example.fields
        if fields["source"] == CSQA:
            return f"asks without answering: {', '.join(fields['choices'] or ())}"
        if fields["source"] == NQ:
            return f"asks again: {fields['question']}"
        if not fields["conversation_history"]:
            return "begins"
        return {True: "ends", False: "goes on", None: ""}[fields["is_last_turn"]]

    # -- batches ------------------------------------------------------------------------------

    batch_reads_texts = True

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """The headline of each source, and the parts of PRISM's headline."""
        return paper_batch(records)

    def group_rewards(self, records: Sequence[Record]) -> Sequence[Record]:
        """The records, with an additional reward for first messages that differ from the other
        drafts."""
        return with_novelty(records)


def detector_of(task: str, options: Mapping[str, Any]) -> Detector | None:
    """The detection service in a task's options; None: the judge detects. Raises ConfigError."""
    kind = options.get("detector", "judge")
    if kind == "judge":
        return None
    if kind != "url" or not options.get("detector_url"):
        raise ConfigError(
            f"The options of task '{task}' do not name a detector of machine-written text.",
            f"detector is '{kind}' and detector_url is '{options.get('detector_url', '')}'.",
            "Use detector: judge, or detector: url with detector_url and detector_key_env.",
        )
    return Detector(**_detector_arguments(task, options))


def _detector_arguments(task: str, options: Mapping[str, Any]) -> dict[str, Any]:
    names = {"detector_url": "url", "detector_key_env": "key_env", "detector_header": "header",
             "detector_field": "field", "detector_machine": "machine"}  # fmt: skip
    settings = {k: v for k, v in options.items() if k.startswith("detector_") and v is not None}
    for name, value in settings.items():
        kind = bool if name == "detector_machine" else str
        if name not in names or not isinstance(value, kind):  # the text "false" would count as true
            rule = "true or false, without quotes" if kind is bool else "text"
            advice = f"It must be {rule}." if name in names else did_you_mean(name, names)
            raise ConfigError(
                f"The option {name} of task '{task}' cannot be used.",
                f"Its value is '{value}'.",
                advice,
            )
    return {names[name]: value for name, value in settings.items()}


def verdict_words(verdicts: Sequence[Verdict]) -> str:
    texts = (v.problem or str(next(iter(v.said.values()), "")) for v in verdicts)
    return ", ".join(texts)


def _stripped(value: Any) -> str | None:
    return None if value is None else str(value).strip() or None


def _checked(
    fields: dict[str, Any], conversation: Sequence[Mapping[str, str]] | None
) -> dict[str, Any]:
    source = fields["source"]
    if not source:
        raise ColumnsError(
            "The column 'source' is missing.",
            f"It selects the scoring of a row: {', '.join(SOURCES)}.",
            "If the file uses another name for it, declare that in tasks.yaml: "
            "columns: {source: {aliases: [name_in_your_file]}}",
        )
    if source not in SOURCES:
        why = f"It is '{source}'. {did_you_mean(source, SOURCES)}"
        raise RowError("The row's source is unknown.", why)
    if conversation is None:
        why = "It is neither text nor a list of messages."
        raise RowError("The row's conversation is unreadable.", why)
    if not fields["intent"]:
        raise RowError("The row has no intent.", "The simulated user needs one.")
    if source == CSQA and len(set(fields["choices"] or ())) < 2:
        why = "Role adherence checks whether the message contains them."
        raise RowError("The row has fewer than two choices.", why)
    if source == NQ:
        return _with_suggestion(fields)
    return fields


def _with_suggestion(fields: dict[str, Any]) -> dict[str, Any]:
    """The row, with the assistant's suggestion as the last turn of the conversation."""
    question, suggestion = fields["question"], fields["assistant_suggestion_turn"]
    if not question or not suggestion:
        what = "The row lacks 'question' or 'assistant_suggestion_turn'."
        raise RowError(what, "The judge compares both.")
    if fields["conversation_history"]:
        return fields
    turns = ({"speaker": "user", "text": question}, {"speaker": "assistant", "text": suggestion})
    return {**fields, "conversation_history": turns}


TEXTS = Texts(__file__)
TOO_MUCH = 0.3
"""A larger share of words from the intent gets a remark."""


def message_notes(
    fields: Mapping[str, Any], message: UserMessage | None, score: Score | None
) -> list[str]:
    """Remarks on a draft, worst first; empty without a draft."""
    if score is None or message is None:
        return []
    if not message.text and not message.ended:
        return ["Nothing was said; whoever wants something writes a message."]
    source = fields["source"]
    if source == CSQA:
        return list(_role_notes(fields["choices"] or (), message, score))
    if source == NQ:
        return list(_intent_notes(message, score))
    return list(_prism_notes(score))


def _role_notes(choices: Sequence[str], message: UserMessage, score: Score) -> Iterator[str]:
    count = len(choices_named(choices, message.text, "paper"))
    if score.metrics.get("role_adherence") == 1.0:
        yield "The message left the answering to the other side; keep to that."
    elif count:
        held = "an answer" if count == 1 else f"{count} answers"
        yield f"Whoever asks does not answer, and the message held {held} to what it asked."


def _intent_notes(message: UserMessage, score: Score) -> Iterator[str]:
    adherence = score.metrics.get("intent_adherence")
    if not message.text:
        yield "The conversation was ended although what you came for was not answered."
    elif adherence is not None and adherence < 0.5:
        yield "The reply went along with what was proposed. Do not accept it; your wish is open."
    elif adherence is not None:
        yield "You stayed with what you came for; do so again, in few words."


def _prism_notes(score: Score) -> Iterator[str]:
    metrics = score.metrics
    overlap, human = metrics.get("intent_decomposition"), metrics.get("ai_detector")
    wrong = metrics.get("termination") == 0.0
    if wrong:
        yield "Whether anything was left to ask was misjudged."
    if overlap is not None and overlap > TOO_MUCH:
        yield "Too many words were taken from the description of what you want."
    if human is not None and human < 0.5:
        yield "It reads as if a machine had written it: too finished, too complete, too polite."
    elif human is not None and not wrong and (overlap or 0) <= TOO_MUCH:
        yield "It was like a person at a keyboard; keep that tone."


def lesson_choices(
    fields: Mapping[str, Any], message: UserMessage | None, score: Score | None
) -> Iterator[tuple[str, ...]]:
    """Lessons, the most complete first, for `first_safe_lesson` to choose from."""
    remarks = message_notes(fields, message, score)
    kind = fields["source"]
    if kind not in TEXTS["lessons"]:
        kind = "later" if fields["conversation_history"] else "first"
    general: tuple[str, ...] = TEXTS["lessons"][kind]
    yield (*remarks, *general)
    for note in remarks:
        yield (note,)
    yield general
    yield (general[0],)
    yield ("Write like the one who asks.",)
