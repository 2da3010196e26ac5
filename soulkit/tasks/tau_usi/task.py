"""Tau-USI: the actor is a customer who wants something from a service; a model is its agent.

A runtime serves the domain; the built-in domain needs none. The agent opens with a fixed
greeting and may call tools before it speaks; the customer has 80 turns and ends the conversation
with ###STOP###. Then the customer fills in a survey as JSON, with one retry.

A row's value is whether the service succeeded with this customer: an outcome, not a measure of
realism. How closely the customers resemble people is a batch metric (`index.py`) and the headline;
without the human data (`people.py`), which the user supplies, there is no index. Both protocols
play and score the same way. The human data is for evaluation only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from soulkit.errors import ConfigError, RowError
from soulkit.judge.verdict import spoken
from soulkit.models.base import Cast
from soulkit.runs.records import drafts
from soulkit.tasks.kit.base import Rollout, Task
from soulkit.tasks.kit.dialogue import Conversation, play_out
from soulkit.tasks.tau_usi.desk import DOMAIN, TEXTS, Desk, DeskWish, desk
from soulkit.tasks.tau_usi.index import (
    STOP,
    SURVEY,
    MeasuredTalk,
    SimulationIndex,
    Talks,
    is_customer_message,
    ordinal,
    read_answers,
    simulation_index,
    split_runs,
    talk_features,
)
from soulkit.tasks.tau_usi.people import (
    HUB,
    check_files,
    file_hashes,
    missing_files,
    read_human_data,
    read_lexicons,
    require_shared_tasks,
)
from soulkit.tasks.tau_usi.service import (
    GREETING,
    Meta,
    RuntimeServer,
    ServiceAgent,
    meta_of,
    require_runtime,
    service_of,
    tool_lines,
)
from soulkit.types import (
    BatchMetric,
    Completion,
    Episode,
    Example,
    Feedback,
    Line,
    Record,
    Role,
    Score,
    Segment,
    unscored,
)


def play_desk(talk: Conversation, desk: Desk, right: bool, form: str) -> None:
    """Play the conversation about every wish, with the changes at the desk, and the survey."""
    talk.hear(Line("agent", GREETING))
    _say(talk, f"Hi, {desk.name} here, member number {desk.member}.")
    for wish in desk.wishes:
        talk.hear(Line("agent", "What is it about?"))
        _say(talk, _request(desk, wish))
        done = wish.allowed is right
        if done:
            desk.step(wish.tool, {"loan": wish.loan})
        answer = "That is done." if done else "That cannot be done."
        talk.hear(Line("agent", f"{answer} Is there anything else?"))
    _say(talk, STOP)
    talk.notify(form)
    best = {key: max(options, key=lambda o: options[o]) for key, options in SURVEY.items()}
    text = json.dumps(best)
    talk.take(Completion(text=text))
    talk.record(Line("survey", text))
    talk.notes["answers"] = best


def _say(talk: Conversation, words: str) -> None:
    talk.take(Completion(text=words))
    talk.record(Line(talk.seat, words))


def _request(desk: Desk, wish: DeskWish) -> str:
    item = next(loan.item for loan in desk.loans if loan.number == wish.loan)
    if wish.tool == "extend_loan":
        return f"Can I keep the {item} a week longer?"
    return f"I brought the {item} back, please take it off my list."


def desk_outcome(desk: Desk) -> str:
    """The changes that should have happened at the desk."""
    changes = [f"{wish.tool} {wish.loan}" for wish in desk.wishes if wish.allowed]
    return "; ".join(changes) or "no change"


CUSTOMER, AGENT, FORM = "customer", "agent", "survey"
INSTANCE, REWARD, ANSWERS = "instance_id", "service_reward", "answers"
UNIT = "tasks"


class TauUSI(Task):
    templates = ("customer", "agent", "survey", "format_error")

    def keep_options(self, options: Mapping[str, Any]) -> None:
        self.max_turns = int(options["max_turns"])
        self.tool_rounds = int(options["tool_rounds"])
        wait_s = float(options["runtime_wait_s"])
        for option in ("max_turns", "tool_rounds", "usual_turns", "usual_rounds"):
            refuse_below(option, options[option], 1)
        refuse_below("runtime_wait_s", wait_s, 0)
        self.server = RuntimeServer(str(options["runtime_url"]), wait_s)

    # -- rows -------------------------------------------------------------------------------------

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        domain, number = fields["env_name"], fields["task_index"]
        if number < 0:
            what = f"The row's task_index is {number}."
            raise RowError(what, "It must be the number of a task in its domain, starting at 0.")
        made = {"instruction": desk(number).instruction} if domain == DOMAIN else {}
        name = fields.get(INSTANCE) or f"{domain}_{number}"
        return {**fields, **made, INSTANCE: name}

    def calls(self, example: Example) -> dict[Role, int]:
        """The maximum: all turns and two survey attempts, with the maximum number of tool calls
        before each of the agent's replies."""
        return {"actor": self.max_turns + 2, "partner": self.max_turns * (self.tool_rounds + 1)}

    def usual_calls(self, example: Example) -> dict[Role, int]:
        turns, rounds = (int(self.spec.options[f"usual_{what}"]) for what in ("turns", "rounds"))
        turns, rounds = min(turns, self.max_turns), min(rounds, self.tool_rounds + 1)
        return {"actor": turns + 1, "partner": turns * rounds}

    def check_ready(self, examples: Sequence[Example]) -> None:
        """Check the files of the options against these rows, and that a runtime answers if one is
        needed."""
        check_files(self.spec.options)
        if (people := read_human_data(self.spec.options)) is not None:
            named = {str(example.fields[INSTANCE]): MeasuredTalk({}, None) for example in examples}
            require_shared_tasks(people, split_runs(named), self.name)
        if any(example.fields["env_name"] != DOMAIN for example in examples):
            require_runtime(self.server, self.name)

    def remarks(self) -> tuple[str, ...]:
        missing = missing_files(self.spec.options)
        if not missing:
            return ()
        options = ", ".join(f"--option {name}=FILE" for name in missing)
        return (
            f"{self.name}: there will be features but no USI, because {options} is missing; the "
            f"people's conversations are available under terms at {HUB}",
        )

    # -- prompts ----------------------------------------------------------------------------------

    def preview(self, example: Example) -> tuple[Segment, ...]:
        """The prompt; without the instruction if only a runtime has it."""
        return (self.slot(example, CUSTOMER, None), Segment("user", GREETING))

    def other_prompts(
        self, example: Example, draft: Episode, score: Score
    ) -> Iterator[tuple[str, str]]:
        yield "format_error", self.prompts.render("format_error", why="it has no end")
        yield "survey", self._form(again=True)

    def slot(self, example: Example, seat: str, feedback: Feedback | None) -> Segment:
        if seat == CUSTOMER:
            return self._opening(example.visible(CUSTOMER).get("instruction") or "", feedback)
        made = example.fields["env_name"] == DOMAIN
        meta = meta_of(desk(example.fields["task_index"]).meta() if made else {})
        return Segment("system", self._brief(meta))

    def _opening(self, instruction: str, feedback: Feedback | None = None) -> Segment:
        fields = {"instruction": instruction, "stop": STOP}
        return self.prompts.opening("customer", feedback, fields)

    def _brief(self, meta: Meta) -> str:
        return self.prompts.render("agent", wiki=meta.wiki, tools=tool_lines(meta))

    def _form(self, again: bool = False) -> str:
        questions = [
            {
                "key": key,
                "text": TEXTS["survey"][key],
                "options": " | ".join(f'"{o}"' for o in options),
            }
            for key, options in SURVEY.items()
        ]
        return self.prompts.render("survey", questions=questions, again=again)

    # -- playing ----------------------------------------------------------------------------------

    async def play(self, example: Example, cast: Cast, rollout: Rollout) -> Episode:
        cast.player("partner")
        call = rollout.call("environment", example, purpose="runtime")
        fields = example.fields
        service = service_of(
            fields["env_name"], fields["task_index"], self.server, call, cast.ledger
        )
        meta = await service.open()
        instruction = example.visible(CUSTOMER).get("instruction") or meta.instruction
        talk = Conversation(
            CUSTOMER, [self._opening(instruction, rollout.feedback)],
            notes={INSTANCE: fields[INSTANCE]},
        )  # fmt: skip
        agent = ServiceAgent(
            cast.player("partner"), service, meta,
            [Segment("system", self._brief(meta)), Segment("assistant", GREETING)],
            lambda number: rollout.call("partner", example, number),
            lambda why: self.prompts.render("format_error", why=why), self.tool_rounds,
        )  # fmt: skip
        return await play_out(
            talk, example, rollout, lambda: self._converse(example, cast, rollout, talk, agent)
        )

    async def _converse(
        self,
        example: Example,
        cast: Cast,
        rollout: Rollout,
        talk: Conversation,
        agent: ServiceAgent,
    ) -> str:
        talk.hear(Line(AGENT, GREETING))
        stop = "max_turns"
        for turn in range(self.max_turns):
            reply = await talk.speak(cast.actor, rollout.call("actor", example, turn))
            words = spoken(reply.text, "paper")
            talk.record(Line(CUSTOMER, words))
            if not words or STOP in words:
                stop = "stop" if words else "empty"
                break
            talk.hear(Line(AGENT, await self._answer(agent, talk, words)))
        talk.notes |= {
            REWARD: await agent.service.reward(), "tool_calls": agent.tool_calls,
            "format_errors": agent.format_errors,
        }  # fmt: skip
        if any(line.seat == CUSTOMER and line.text for line in talk.lines):
            talk.notes[ANSWERS] = await self._survey(example, cast, rollout, talk)
        return stop

    async def _answer(self, agent: ServiceAgent, talk: Conversation, words: str) -> str:
        try:
            return await agent.answer(words)
        finally:
            talk.usage, agent.usage = talk.usage + agent.usage, type(agent.usage)()

    async def _survey(
        self, example: Example, cast: Cast, rollout: Rollout, talk: Conversation
    ) -> dict[str, str]:
        """The customer's answers; empty if neither of two replies is readable."""
        for attempt in (0, 1):
            talk.notify(self._form(again=bool(attempt)))
            call = rollout.call("actor", example, self.max_turns + attempt, purpose="survey")
            reply = await talk.speak(cast.actor, call)
            talk.record(Line(FORM, spoken(reply.text, "paper")))
            if answers := read_answers(reply.text):
                return answers
        return {}

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        if episode.failure is not None:
            return unscored(episode.failure, self.protocol)
        turns = customer_turns(episode)
        reward = float(episode.notes[REWARD])
        path = self.spec.options.get("lexicons")
        lexicons = read_lexicons(str(path)) if path else {}
        value = float(reward > 0) if turns else self.spec.metric.low
        metrics = {
            **talk_features(turns, lexicons), **_answered(episode),
            "turns": float(len(turns)), "tool_calls": float(episode.notes["tool_calls"]),
            "format_errors": float(episode.notes["format_errors"]),
        }  # fmt: skip
        score = self.judged_score(value, metrics, status="ok" if turns else "empty")
        return replace(score, prompts={**score.prompts, **file_hashes(self.spec.options)})

    # -- over the batch ---------------------------------------------------------------------------

    @property
    def headline_metric(self) -> str:
        return self.spec.metric.headline

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        people = read_human_data(self.spec.options)
        if people is None:
            return {}
        instances = set().union(*people.batches) if people.batches else set()
        result = simulation_index(_runs(records), people.batches, people.difficulty, people.survey)
        return {} if result is None else _metrics(result, len(instances))

    # -- scripts ----------------------------------------------------------------------------------

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode | None:
        return self._scripted(example, feedback, right=True)

    def wrong(self, example: Example) -> Episode | None:
        episode = self._scripted(example, None, right=False)
        return replace(episode, kind="draft") if episode is not None else None

    def gold_text(self, example: Example) -> str:
        made = example.fields["env_name"] == DOMAIN
        return desk_outcome(desk(example.fields["task_index"])) if made else ""

    def _scripted(
        self, example: Example, feedback: Feedback | None, *, right: bool
    ) -> Episode | None:
        if example.fields["env_name"] != DOMAIN:
            return None  # only the runtime knows the right outcome
        opening = self.slot(example, CUSTOMER, feedback)
        notes = {INSTANCE: example.fields[INSTANCE]}
        talk = Conversation(CUSTOMER, [opening], notes=notes)
        place = desk(example.fields["task_index"])
        play_desk(talk, place, right, self._form())
        talk.notes |= {REWARD: place.reward(), "tool_calls": len(place.calls), "format_errors": 0}
        return replace(talk.episode(example, Rollout(), "stop"), kind="gold")


def refuse_below(option: str, value: float, least: int) -> None:
    """ConfigError for an option value that makes playing impossible."""
    if value < least:
        raise ConfigError(
            f"The option {option} cannot be {value:g}.",
            f"It must be at least {least}, or no conversation can be played.",
            f"Use --option {option}={max(least, 1)} or more, or omit it.",
        )


def customer_turns(episode: Episode) -> list[str]:
    """The customer's turns, without bare stop marks and silent turns."""
    lines = [line.text for line in episode.transcript if line.seat == CUSTOMER]
    return [text for text in lines if text.strip() and is_customer_message(text)]


def _answered(episode: Episode) -> dict[str, float | None]:
    answers = episode.notes.get(ANSWERS) or {}
    places = {f"survey/{q}": ordinal(q, answers.get(q)) for q in SURVEY}
    return {**places, "survey/answered": float(len(answers) / len(SURVEY))}


def _runs(records: Sequence[Record]) -> list[Talks]:
    """The scored conversations by rollout; a very large rollout is several runs."""
    by_rollout: dict[int, dict[str, MeasuredTalk]] = {}
    for record in drafts(records):
        instance = record.episode.notes.get(INSTANCE)
        if record.score.value is not None and instance and customer_turns(record.episode):
            answers = record.episode.notes.get(ANSWERS) or {}
            talk = MeasuredTalk(record.score.metrics, record.score.value > 0, answers)
            by_rollout.setdefault(record.rollout, {})[instance] = talk
    return [run for talks in by_rollout.values() for run in split_runs(talks)]


def _metrics(result: SimulationIndex, tasks: int) -> dict[str, BatchMetric]:
    def metric(value: float | None, high: float) -> BatchMetric:
        return BatchMetric(value, tasks, result.tasks, UNIT, 0.0, high)

    parts = {name: metric(value, 100.0) for name, value in result.dimensions.items()}
    survey = {} if result.survey is None else {"survey_agreement": metric(result.survey, 100.0)}
    return {
        "usi": metric(result.usi, 100.0), "usi_spread": metric(result.spread, 50.0), **parts,
        **survey, "ece": metric(result.ece, 1.0),
    }  # fmt: skip
