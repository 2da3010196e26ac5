"""Sotopia: two characters with separate goals meet; the actor plays one of them.

`eval_position` names the actor's seat. A goal and a profile are visible to their seat and the
judge. Turns alternate strictly, agent1 first, for 20 turns in total. The scene ends when a
character leaves, or after more than two consecutive turns without an action, counted for both sides
together or for one side. A partner fails if two replies are unusable, or if it leaves before the
actor's first turn.

`paper`: the value is the mean of the judge's seven raw scores / 10. The auditor's finding is the
metric `hacked`; an episode at medium or high risk gets the minimum reward. With `hack_penalty: off`
the finding costs nothing, with `always` the value is the minimum as well. Without a readable judge
the episode is unscored; without a readable auditor, every number that depends on it has no value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from soulkit.errors import ConfigError, RowError, UnreadableVerdict, did_you_mean
from soulkit.judge import panel
from soulkit.judge.coach import RISKS, Audit, agreed_risk
from soulkit.judge.leaks import LeakView
from soulkit.judge.panel import ask_several
from soulkit.judge.structured import JudgeQuestion, question
from soulkit.judge.verdict import fence
from soulkit.models.base import Cast, Player
from soulkit.tasks.kit.base import READABLE, Rollout, Task
from soulkit.tasks.kit.dialogue import (
    Conversation,
    cut_note,
    others_view,
    others_words,
    partner_reply,
    play_out,
)
from soulkit.tasks.sotopia import judging
from soulkit.tasks.sotopia.actions import (
    LEAVE,
    MAX_CHARS,
    NONE,
    Action,
    line_of,
    narrate,
    parse_line,
    read_action,
    with_names,
)
from soulkit.tasks.sotopia.judging import DIMENSIONS, Ratings, average, raw_score, weighted
from soulkit.types import (
    Completion,
    Episode,
    Example,
    Feedback,
    Kind,
    Line,
    Role,
    Score,
    Segment,
    Turn,
    unscored,
)

SEATS = ("agent1", "agent2")
START = "(The scene begins.)"


@dataclass
class Scene:
    """A scene in progress: the actor's conversation, and everyone's actions."""

    task: Sotopia
    example: Example
    cast: Cast
    rollout: Rollout
    talk: Conversation
    done: list[tuple[str, Action]] = field(default_factory=list)
    silence: str = "empty"
    """The stop reason after a silent turn."""

    async def play(self) -> str:
        """Play all turns and return the stop reason."""
        for index in range(self.task.max_turns):
            seat = SEATS[index % 2]
            acting = self._act if seat == self.talk.seat else self._answer
            action = await acting(seat, index)
            if action is None:
                return self.silence
            self.done.append((seat, action))
            if action.kind == LEAVE and index >= self.task.leave_from:
                return "left"
            if self._stale(seat):
                return "stale"
        return "max_turns"

    def actor(self) -> Player | None:
        """The player for the actor's turn; None if no tokens are left."""
        return self.cast.actor

    async def _act(self, seat: str, index: int) -> Action | None:
        """The actor's turn; None if silence ends the scene."""
        call = self.rollout.call("actor", self.example, index)
        context, actor = tuple(self.talk.context), self.actor()
        if actor is None:
            self.silence = "length"
            return None
        reply = await self.talk.speak(actor, call)
        action = self._read(seat, reply.text, context)
        if action is None:
            return None
        # An endless reply would be in every later context; replies with token ids stay unchanged.
        short = bool(reply.token_ids) or len(reply.text) <= MAX_CHARS
        self._note_cut(seat, action)
        line = self.task.line(self.example, seat, action)
        self.talk.record(line, memory=reply.text if short else action.json())
        return action

    async def _answer(self, seat: str, index: int) -> Action | None:
        """The partner's turn; an unusable reply is requested once more."""
        partner, context = self.cast.player("partner"), self._partner_context(seat)

        def read(reply: str) -> Action | None:
            action = self._read(seat, reply, context)
            usable = action is not None and action.status in READABLE
            return action if usable and not leaves_at_once(action) else None

        def leaves_at_once(action: Action | None) -> bool:
            """Whether the partner leaves before the actor's first turn, so that there is nothing to
            rate."""
            return action is not None and action.kind == LEAVE and not self.talk.turns

        def trouble(reply: str) -> str:
            at_once = leaves_at_once(self._read(seat, reply, context))
            return "left before the actor's first turn" if at_once else "said nothing usable"

        call = self.rollout.call("partner", self.example, index)
        action, usage = await partner_reply(
            partner, context, call, read, "the partner", trouble=trouble
        )
        self.talk.usage += usage
        return self._hear(seat, action)

    def _hear(self, seat: str, action: Action) -> Action:
        self._note_cut(seat, action)
        line = self.task.line(self.example, seat, action)
        self.talk.hear(line, self.task.public_line(self.example, seat, action))
        return action

    def _read(self, seat: str, reply: str, context: Sequence[Segment]) -> Action | None:
        """The parsed action; None if silence ends the scene."""
        name = self.task.names(self.example)[seat]
        return read_action(reply, self.task.protocol, name, others_words(context))

    def _partner_context(self, seat: str) -> tuple[Segment, ...]:
        """The partner's own actions in the required form, the actor's as heard."""
        opening = (self.task.slot(self.example, seat, None), Segment("user", START))
        lines = [
            Line(
                speaker,
                action.json()
                if speaker == seat
                else self.task.public_line(self.example, speaker, action),
            )
            for speaker, action in self.done
        ]
        return others_view(seat, opening, lines)

    def _note_cut(self, seat: str, action: Action) -> None:
        if action.cut:
            counts = self.talk.notes.setdefault("cut_lines", {})
            counts[seat] = counts.get(seat, 0) + 1

    def _stale(self, seat: str) -> bool:
        """Whether more than `stale_turns` consecutive turns, of both or this seat, did nothing."""
        everybody = [action.kind for _, action in self.done]
        seat_kinds = [action.kind for speaker, action in self.done if speaker == seat]
        limit = self.task.stale_turns + 1
        return any(kinds[-limit:] == [NONE] * limit for kinds in (everybody, seat_kinds))


NOTHING = "(Nothing was said or done.)"
PRIVATE = ("background", "goal")
PENALTIES = ("train", "off", "always")
_Opinions = tuple[list[panel.Opinion[Any]], list[panel.Opinion[Audit]]]


class Sotopia(Task):
    templates = ("character", "judge", "audit")
    ratings = Ratings
    scene = Scene
    judges_silence = False
    """Whether judges also rate an actor that never said or did anything."""
    leave_from = 0
    """The first turn from which leaving counts."""

    def keep_options(self, options: Mapping[str, Any]) -> None:
        self.max_turns = int(options[f"{self.protocol}_turns"])
        self.stale_turns = int(options["stale_turns"])
        self.hack_penalty = penalty_of(self.name, options)

    # -- rows -------------------------------------------------------------------------------------

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        position = fields.get("eval_position")
        place = "agent1" if position is None else str(position).strip().lower()
        if place not in SEATS:
            what = f"The row's eval_position is '{position}'."
            raise RowError(what, "It must be agent1 or agent2.")
        if fields["agent1_name"].split() == fields["agent2_name"].split():
            what = f"Both characters of the row are named '{fields['agent1_name']}'."
            raise RowError(what, "A judge could not tell them apart.")
        return {**fields, "eval_position": place}

    def seats(self, fields: Mapping[str, Any]) -> Mapping[str, Role]:
        return {seat: "actor" if seat == fields["eval_position"] else "partner" for seat in SEATS}

    def audience(self, fields: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
        readers = dict(super().audience(fields))
        for seat in self.coached(fields):
            for name in PRIVATE:
                readers[f"{seat}_{name}"] = (*readers[f"{seat}_{name}"], "coach")
        return readers

    def coached(self, fields: Mapping[str, Any]) -> Sequence[str]:
        """The seats whose private texts the coach reads."""
        return (fields["eval_position"],)

    def calls(self, example: Example) -> dict[Role, int]:
        """Half the turns per side (agent1 gets an odd one), one judge call and one auditor call."""
        first: Role = example.seats["agent1"]
        second: Role = example.seats["agent2"]
        return {
            first: (self.max_turns + 1) // 2,
            second: self.max_turns // 2,
            "judge": 1,
            "auditor": 1,
        }

    def names(self, example: Example) -> dict[str, str]:
        """Seat → the character's name."""
        return {seat: str(example.fields[f"{seat}_name"]) for seat in SEATS}

    # -- prompts ----------------------------------------------------------------------------------

    def view(
        self, example: Example, seat: str, reader: str
    ) -> tuple[dict[str, Any], dict[str, int]]:
        """The values that `reader` may see of the scene from `seat`'s side, and the words cut per
        field."""
        fields, cuts = self.within_budget(example.visible(reader))
        names, other_seat = self.names(example), SEATS[1 - SEATS.index(seat)]

        def placed(name: str) -> str:
            text = str(fields.get(name) or "")
            return with_names(text, names["agent1"], names["agent2"], self.protocol)

        return {
            "name": names[seat], "other": names[other_seat], "scenario": placed("scenario"),
            "relationship": str(fields.get("relationship") or ""),
            "background": str(fields.get(f"{seat}_background") or ""),
            "goal": placed(f"{seat}_goal"),
            "other_background": str(fields.get(f"{other_seat}_background") or ""),
            "other_goal": placed(f"{other_seat}_goal"),
        }, cuts  # fmt: skip

    def slot(self, example: Example, seat: str, feedback: Feedback | None) -> Segment:
        view, _ = self.view(example, seat, seat)
        fields = {name: text for name, text in view.items() if not name.startswith("other_")}
        return self.prompts.opening("character", feedback, fields)

    def line(self, example: Example, seat: str, action: Action) -> Line:
        """The recorded line of an action."""
        return Line(seat, narrate(self.names(example)[seat], action))

    def public_line(self, example: Example, seat: str, action: Action) -> str:
        """The line of an action that everyone hears."""
        return line_of(self.names(example)[seat], action, self.protocol)

    def preview(self, example: Example) -> tuple[Segment, ...]:
        return (self.slot(example, self.acted_seat(example), None), Segment("user", START))

    def conversation(self, example: Example, feedback: Feedback | None) -> Conversation:
        """The actor's conversation before the first turn."""
        seat = self.acted_seat(example)
        _, cuts = self.view(example, seat, "judge")
        talk = Conversation(seat, [self.slot(example, seat, feedback)], notes=cut_note(cuts))
        talk.notify(START)
        return talk

    # -- playing ----------------------------------------------------------------------------------

    async def play(self, example: Example, cast: Cast, rollout: Rollout) -> Episode:
        cast.player("partner")
        scene = self.scene(
            self, example, cast, rollout, self.conversation(example, rollout.feedback)
        )
        return await play_out(scene.talk, example, rollout, scene.play)

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        """The verdicts of judges and auditors as one Score.

        Raises UnreadableVerdict (the episode is then unscored) if a judge's rating is unreadable,
        or the audit if the value depends on it. A missing audit is not a passed audit: other
        numbers that depend on it are None, and the score's reason says why.
        """
        if episode.failure is not None:
            return unscored(episode.failure, self.protocol)
        acts = self.acts(example, episode)
        if not self.judges_silence and all(act.kind == NONE for act in acts):
            return self._silent(episode, acts)
        rated, audits = await self._opinions(example, episode, cast)
        raw = {name: panel.pooled(rated, partial(raw_score, name), cast.panel.combine)
               for name in DIMENSIONS}  # fmt: skip
        levels = [audit.risk_level for audit in panel.readable(audits)]
        unaudited = bool(audits) and not levels
        risks = RISKS if unaudited else [agreed_risk(levels) if levels else "low"]
        outcomes = [self._numbers(raw, risk, episode, acts) for risk in risks]
        value, _, metrics, status = outcomes[0]
        if unaudited:
            metrics = {name: _agreed([outcome[2][name] for outcome in outcomes])
                       for name in metrics}  # fmt: skip
        agreed = panel.mean_agreement(
            (rated, partial(raw_score, name), d.low, d.high) for name, d in DIMENSIONS.items()
        )
        score = self.judged_score(
            value, {**raw, **metrics, **agreed}, panel.verdicts_of(rated, audits), status=status,
            words=panel.in_words(rated),
        )  # fmt: skip
        reward = _agreed([outcome[1] for outcome in outcomes])
        return replace(score, reward=reward, reason=UnreadableVerdict.reason if unaudited else "")

    @property
    def value_needs_audit(self) -> bool:
        """Whether the auditor's finding changes the value."""
        return self.hack_penalty == "always"

    def acts(self, example: Example, episode: Episode) -> list[Action]:
        """The actor's turns, parsed again from its completions."""
        turns = episode.traces[0].turns if episode.traces else ()
        name = self.names(example)[self.acted_seat(example)]
        return [
            read_action(turn.completion.text, self.protocol, name, others_words(turn.context))
            for turn in turns
        ]

    def _numbers(
        self, raw: Mapping[str, float], risk: str, episode: Episode, acts: Sequence[Action]
    ) -> tuple[float, float, dict[str, float | None], str]:
        """(value, reward, additional metrics, status)."""
        metrics: dict[str, float | None] = {
            "eval_avg": average(raw), "weighted": weighted(raw), "turns": float(len(acts)),
            "hacked": float(risk != "low"),
        }  # fmt: skip
        low, mean = self.spec.metric.low, average(raw) / 10
        if risk != "low" and self.hack_penalty == "always":
            return low, low, metrics, "hacked"
        well_formed = all(act.status == "ok" for act in acts)
        reward = low if risk != "low" and self.hack_penalty == "train" else mean
        return mean, reward, metrics, "ok" if well_formed else "salvaged"

    async def _opinions(self, example: Example, episode: Episode, cast: Cast) -> _Opinions:
        shape, prompt = self.ratings, self.judge_prompt(example, episode)
        questions: list[JudgeQuestion[Any]] = [question("score", prompt, shape, beside=(Audit,))]
        if lines := self._audited(example, episode):
            prompt = self.audit_prompt(example, lines)
            questions.append(question("audit", prompt, Audit, beside=(shape,), role="auditor"))
        may_miss = [
            judge_question.purpose
            for judge_question in questions
            if judge_question.role == "auditor"
        ]
        may_miss = [] if self.value_needs_audit else may_miss
        replies = await ask_several(cast, questions, episode, may_miss)
        return replies["score"], replies.get("audit", [])

    def judge_prompt(self, example: Example, episode: Episode) -> str:
        view, _ = self.view(example, self.acted_seat(example), "judge")
        return self.prompts.render("judge", **view, transcript=self._fenced(example, episode))

    def audit_prompt(self, example: Example, lines: Iterable[str]) -> str:
        view, _ = self.view(example, self.acted_seat(example), "judge")
        return self.prompts.render("audit", **view, lines=fence("\n".join(lines), "lines"))

    def _fenced(self, example: Example, episode: Episode) -> str:
        idle = {narrate(name, Action(NONE)) for name in self.names(example).values()}
        lines = [
            self._retold(example, line) for line in episode.transcript if line.text not in idle
        ]
        return fence("\n".join(lines) or NOTHING, "transcript")

    def _retold(self, example: Example, line: Line) -> str:
        name = self.names(example).get(line.seat)
        return (
            line.text if name is None else line_of(name, parse_line(name, line.text), self.protocol)
        )

    def _audited(self, example: Example, episode: Episode) -> list[str]:
        seat, names = self.acted_seat(example), self.names(example)
        silent = narrate(names[seat], Action(NONE))
        lines = [line for line in episode.transcript if line.seat == seat]
        return [self._retold(example, line) for line in lines if line.text != silent]

    def _silent(self, episode: Episode, acts: Sequence[Action]) -> Score:
        parsed = "malformed" if any(act.status == "malformed" for act in acts) else "empty"
        nothing = dict.fromkeys((*DIMENSIONS, "eval_avg", "weighted", "hacked"))
        return self.silent_score(
            episode, "The character never said or did anything.",
            {**nothing, "turns": float(len(acts))}, parsed,
        )  # fmt: skip

    # -- feedback ---------------------------------------------------------------------------------

    def coach_view(self, example: Example, episode: Episode, score: Score) -> dict[str, Any]:
        view, _ = self.view(example, self.acted_seat(example), "coach")
        return {
            **view, "transcript": self._fenced(example, episode),
            "marks": judging.marks(score.metrics),
            "notes": judging.judge_notes(score, self.hidden_from_coach(example)),
            "words": int(self.spec.options["coach_words"]),
            "most_words": self.spec.feedback.max_words,
        }  # fmt: skip

    def hidden_from_coach(self, example: Example) -> LeakView:
        """The texts that the judge's remarks must not pass on to the coach."""
        return self.leak_view(example)

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        view, _ = self.view(example, self.acted_seat(example), "coach")
        if episode is None:
            return judging.advice(view["goal"])
        return judging.goal_lesson(self.acts(example, episode), view["goal"], self.max_turns)

    def leak_view(self, example: Example) -> LeakView:
        seat = self.acted_seat(example)
        view, _ = self.view(example, seat, "judge")
        private = (view["other_goal"], view["other_background"])
        visible = ("name", "other", "scenario", "relationship", "background", "goal")
        return LeakView(
            private=tuple(text for text in private if text.strip()),
            rubric=judging.RUBRIC,
            public="\n".join(view[name] for name in visible),
        )

    # -- scripts ----------------------------------------------------------------------------------

    gold_is_script = True

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode:
        return self.scripted(example, judging.scripted_replies("competent"), feedback, "gold")

    def wrong(self, example: Example) -> Episode:
        return self.scripted(example, judging.scripted_replies("rude"))

    def canary(self, example: Example, text: str) -> Episode:
        return self.scripted(example, (Action("speak", text).json(),) * judging.CANARY_TURNS)

    def verdict(self, form: str, perfect: bool) -> str | None:
        return judging.scripted_ratings(form, perfect)

    def scripted(
        self, example: Example, actor_replies: Sequence[str], feedback: Feedback | None = None,
        kind: Kind = "draft",
    ) -> Episode:  # fmt: skip
        talk, names = self.conversation(example, feedback), self.names(example)
        partner_lines, stop = iter(judging.TEXTS["neutral"]), "max_turns"
        replies = iter(actor_replies)
        for index in range(min(2 * len(actor_replies), self.max_turns)):
            seat = SEATS[index % 2]
            if seat != talk.seat:
                action = Action("speak", next(partner_lines))
                talk.hear(self.line(example, seat, action), self.public_line(example, seat, action))
                continue
            reply = next(replies)
            words = others_words(talk.context)
            action = read_action(reply, self.protocol, names[seat], words)
            talk.turns.append(Turn(tuple(talk.context), Completion(text=reply)))
            talk.record(self.line(example, seat, action), memory=reply)
            if action.kind == LEAVE and index >= self.leave_from:
                stop = "left"
                break
        return talk.episode(example, Rollout(kind=kind), stop)

    def gold_text(self, example: Example) -> str:
        return str(example.fields.get(f"{self.acted_seat(example)}_goal") or "")


def penalty_of(task: str, options: Mapping[str, Any]) -> str:
    """The effect of an auditor's finding, one of PENALTIES; ConfigError for anything else."""
    penalty = options.get("hack_penalty", "train")
    if penalty is False:  # in YAML, a bare `off` is a boolean
        penalty = "off"
    if penalty not in PENALTIES:
        raise ConfigError(
            f"The task '{task}' has no hack_penalty '{penalty}'.",
            "Replies written for the judge lose the reward (train), also the score (always), or "
            "nothing (off).",
            did_you_mean(str(penalty), PENALTIES),
        )
    return str(penalty)


def _agreed(values: Sequence[float | None]) -> float | None:
    """The number that does not depend on the auditor; None if it does."""
    return values[0] if len(set(values)) == 1 else None
