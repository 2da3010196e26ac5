"""The engine: who sees what, what a failure becomes, when there is feedback, what leaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soulkit.errors import CallError, ConfigError, ContextOverflow, ProviderError
from soulkit.judge.verdict import has_word
from soulkit.models.base import Cast, Player
from soulkit.models.local.sampler import LocalModel
from soulkit.play.engine import Engine, FeedbackPolicy, Job, gather
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.secret_keeper.task import visitor_line
from soulkit.types import Call, Completion, Example, Feedback, Record, Sampling, Segment, Usage
from tests.support.evaluation import examples

Reply = Callable[[Sequence[Segment], Call], str]


@dataclass
class Voice:
    """A live model that says what `reply` says, and remembers what it was shown."""

    reply: Reply
    name: str = "voice"
    seen: list[tuple[Call, tuple[Segment, ...]]] = field(default_factory=list)

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        self.seen.append((call, tuple(context)))
        await asyncio.sleep(0)
        return Completion(text=self.reply(context, call), usage=Usage(calls=1))

    async def close(self) -> None:
        """Nothing is open."""


def voice(text: str) -> Voice:
    return Voice(lambda context, call: text)


def failing(error: Exception, after: int = 0) -> Voice:
    def reply(context: Sequence[Segment], call: Call) -> str:
        if call.turn >= after:
            raise error
        return "What is your job?"

    return Voice(reply)


def visitor(context: Sequence[Segment], call: Call) -> str:
    return visitor_line([{"role": s.role, "content": s.text} for s in context])


def cast(actor: Voice, **others: Voice) -> Cast:
    return Cast(actor=Player(actor), **{role: Player(v) for role, v in others.items()})  # type: ignore[arg-type]


def run(engine: Engine, jobs: Sequence[Job]) -> list[Record]:
    return asyncio.run(engine.run(jobs, lambda record: None))


def job(example: Example, index: int = 0) -> Job:
    return Job(load_registry().task(example.task), example, index)


# --- nobody sees what is another's ----------------------------------------------------------------

WORDS = st.sampled_from(["amber", "birch", "cobalt", "delta", "ember", "fjord", "garnet", "hazel"])


def people(draw: Any) -> Example:
    values = draw(st.lists(WORDS, min_size=4, max_size=4, unique=True))
    topics = draw(st.permutations(["job", "pet", "dish", "hideout"]))
    row = {
        "keeper": "Rosa",
        "visitor": "Sven",
        "place": "ferry",
        "facts": [{"topic": t, "value": v} for t, v in zip(topics[:3], values[:3], strict=True)],
        "secret": {"topic": topics[3], "value": values[3]},
        "wanted": ["zzwanted", "yywanted"],
        "curiosity": "xxcurious",
    }
    return load_registry().task("secret_keeper").example(row)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_no_seat_sees_anothers_private_words(data: st.DataObject) -> None:
    example = people(data.draw)
    items = [*example.fields["facts"], example.fields["secret"]]
    tells = data.draw(st.lists(st.sampled_from(items), min_size=6, max_size=6))
    actor = Voice(lambda context, call: f"It is the {tells[call.turn]['value']}.")
    partner = voice("Tell me something about you.")
    (record,) = run(Engine(cast(actor, partner=partner)), [job(example)])
    assert record.score.scored
    for call, context in partner.seen:
        spoken = {tells[turn]["value"] for turn in range(call.turn)}
        shown = "\n".join(segment.text for segment in context)
        for item in items:
            assert has_word(shown, item["value"]) == (item["value"] in spoken)
    for _, context in actor.seen:
        shown = "\n".join(segment.text for segment in context)
        for private in ("zzwanted", "yywanted", "xxcurious"):
            assert private not in shown


def test_made_rows_keep_their_values_from_the_visitor() -> None:
    rows = examples("secret_keeper", 40, seed=3)
    actor, partner = voice("That I keep to myself."), Voice(visitor)
    records = run(Engine(cast(actor, partner=partner)), [job(e) for e in rows])
    by_id = {e.id: e for e in rows}
    assert len(partner.seen) == len(rows) * 6
    for call, context in partner.seen:
        fields = by_id[call.example_id].fields
        shown = "\n".join(segment.text for segment in context)
        for item in (*fields["facts"], fields["secret"]):
            assert not has_word(shown, item["value"])
    assert {r.score.metrics["facts_told"] for r in records} == {0.0}
    assert {r.score.metrics["secret_kept"] for r in records} == {1.0}


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", [0, 2])
def test_a_partner_that_fails_is_not_the_actors_fault(turn: int) -> None:
    (example,) = examples("secret_keeper", 1)
    partner = failing(ProviderError("partner down"), after=turn)
    (record,) = run(Engine(cast(voice("No."), partner=partner)), [job(example)])
    assert (record.score.value, record.score.reward) == (None, None)
    assert (record.score.status, record.score.reason) == ("unscored", "partner_error")
    assert record.score.words == "partner down"
    assert len(record.episode.transcript) == 2 * turn


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ProviderError("no answer"), "provider_error"), (ContextOverflow("long"), "context_overflow")],
)
def test_an_actor_that_cannot_answer_is_unscored(error: CallError, reason: str) -> None:
    (example,) = examples("tomi", 1)
    (record,) = run(Engine(cast(failing(error))), [job(example)])
    assert (record.score.value, record.score.reason) == (None, reason)
    assert record.episode.failure is not None
    assert record.key == f"0/{example.id}/0/draft"


def test_one_failure_does_not_touch_the_others() -> None:
    rows = examples("tomi", 5)

    def reply(context: Sequence[Segment], call: Call) -> str:
        if call.example_id == rows[2].id:
            raise ProviderError("lost")
        return "<answer>nowhere</answer>"

    records = run(Engine(cast(Voice(reply))), [job(e) for e in rows])
    assert [r.example_id for r in records] == [e.id for e in rows]
    assert [r.score.value for r in records] == [0.0, 0.0, None, 0.0, 0.0]


def test_a_bug_stops_the_run_with_itself_and_keeps_what_is_done() -> None:
    rows = examples("tomi", 6)

    def reply(context: Sequence[Segment], call: Call) -> str:
        if call.example_id == rows[3].id:
            raise ZeroDivisionError("a bug")
        return "x"

    records: list[Record] = []
    actor = Voice(reply)
    engine = Engine(cast(actor), concurrency=1)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        asyncio.run(engine.run([job(e) for e in rows], records.append))
    assert [r.example_id for r in records] == [e.id for e in rows[:3]]
    assert len(actor.seen) == 4  # the rest is not paid for


def test_user_errors_come_through_task_groups_bare() -> None:
    (example,) = examples("secret_keeper", 1)
    with pytest.raises(ConfigError, match="role 'partner'"):
        run(Engine(cast(voice("x"))), [job(example)])

    async def boom() -> None:
        raise ConfigError("a", "b", "c")

    async def nested() -> None:
        await gather([gather([boom()])])  # type: ignore[list-item]

    with pytest.raises(ConfigError):
        asyncio.run(nested())


def test_concurrency_is_a_limit_on_rollouts() -> None:
    running, most = 0, 0

    class Counting(Voice):
        async def complete(
            self, context: Sequence[Segment], sampling: Sampling, call: Call
        ) -> Completion:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1
            return Completion(text="x")

    run(Engine(cast(Counting(lambda c, k: "x")), concurrency=3),
        [job(e, i) for e in examples("tomi", 5) for i in range(4)])  # fmt: skip
    assert most == 3


# --- feedback -------------------------------------------------------------------------------------

WRONG = "<answer>nowhere</answer>"


def with_feedback(actor: Voice, coach: Voice | None = None, when: str = "all") -> Engine:
    others = {"coach": coach} if coach else {}
    return Engine(cast(actor, **others), feedback=FeedbackPolicy(when=when))


def test_feedback_goes_into_the_refined_prompt_and_only_there() -> None:
    (example,) = examples("tomi", 1)
    actor = voice(WRONG)
    draft, refined = run(with_feedback(actor, voice("Read it once more.")), [job(example)])
    assert (draft.kind, refined.kind) == ("draft", "refined")
    assert draft.received is not None
    assert draft.received.text == refined.given.text == "Read it once more."  # type: ignore[union-attr]
    first, second = (context[0] for _, context in actor.seen)
    assert "once more" not in first.text
    assert "once more" in second.text
    assert second.bare == first.text
    assert (draft.key, refined.key) == (f"0/{example.id}/0/draft", f"0/{example.id}/0/refined")


def test_feedback_that_gives_the_answer_away_is_recorded_and_dropped() -> None:
    (example,) = examples("tomi", 1)
    gold = str(example.fields["answer"])
    actor = voice(WRONG)
    (draft,) = run(with_feedback(actor, voice(f"It is in the {gold}.")), [job(example)])
    assert draft.received is not None
    assert draft.received.leak == "gold_text"
    assert len(actor.seen) == 1


@pytest.mark.parametrize(
    ("mode", "leak", "plays"), [("drop", "gold_text", 1), ("log", "gold_text", 2), ("off", "", 2)]
)
def test_a_run_may_log_leaks_or_look_for_none(mode: Any, leak: str, plays: int) -> None:
    (example,) = examples("tomi", 1)
    coach = voice(f"It is in the {example.fields['answer']}.")
    policy = FeedbackPolicy(leak_check=mode)
    records = run(Engine(cast(voice(WRONG), coach=coach), feedback=policy), [job(example)])
    received = records[0].received
    assert received is not None and len(records) == plays
    assert (received.leak, received.usable) == (leak, plays == 2)


def test_a_remark_on_the_drafts_own_answer_is_shown() -> None:
    example = next(one for one in examples("paratomi", 40) if len(one.fields["cands"]) > 2)
    gold = example.fields["correct_answer"]
    wrong = next(place for place in example.fields["cands"] if place != gold)
    coach = voice(f"You said {wrong}, but ask whether she was there.")
    (draft, _) = run(with_feedback(voice(f"<answer>{wrong}</answer>"), coach), [job(example)])
    assert draft.received is not None and draft.received.leak == ""


@pytest.mark.parametrize(("when", "right", "wrong"), [("all", 2, 2), ("imperfect", 1, 2)])
def test_the_policy_says_which_drafts_get_feedback(when: str, right: int, wrong: int) -> None:
    (example,) = examples("tomi", 1)
    gold = f"<answer>{example.fields['answer']}</answer>"
    coach = voice("Think again.")
    assert len(run(with_feedback(voice(gold), coach, when), [job(example)])) == right
    assert len(run(with_feedback(voice(WRONG), coach, when), [job(example)])) == wrong


def test_the_tasks_own_gate() -> None:
    policy, task = FeedbackPolicy(when="task"), load_registry().task("hitom")
    (example,) = examples("hitom", 1)
    (record,) = run(Engine(cast(voice("<answer>?</answer>"))), [job(example)])
    assert policy.wants(task, record.score, step=99)
    assert not policy.wants(task, record.score, step=100)  # hitom: until step 100
    assert not policy.wants(task, replace(record.score, reward=1.0), step=0)
    assert not policy.wants(task, replace(record.score, reward=None), step=0)


def worked(example: Example) -> Job:
    """A job of the example's task as if its feedback were worked examples."""
    task = load_registry().task(example.task)
    kind = task.spec.feedback.model_copy(update={"kind": "worked_example"})
    task.spec = task.spec.model_copy(update={"feedback": kind})
    return Job(task, example)


@pytest.mark.parametrize("coach", [None, "The gold is {gold}, since nobody moved anything."])
def test_worked_examples_are_shown_only_where_asked_for(coach: str | None) -> None:
    (example,) = examples("tomi", 1)
    others = {"coach": voice(coach.format(gold=example.fields["answer"]))} if coach else {}
    for shown in (False, True):
        policy = FeedbackPolicy(worked_examples=shown)
        records = run(Engine(cast(voice(WRONG), **others), feedback=policy), [worked(example)])
        assert [r.kind for r in records] == ["draft", "refined"][: 1 + shown]
    feedback = records[1].given
    assert feedback is not None and (feedback.kind, feedback.usable) == ("worked_example", True)
    assert feedback.leak == ("gold_text" if coach else ""), "what it gives away stays on record"


def test_an_unscored_draft_gets_no_feedback() -> None:
    (example,) = examples("tomi", 1)
    coach = voice("Think again.")
    (draft,) = run(with_feedback(failing(ProviderError("down")), coach), [job(example)])
    assert (draft.received, coach.seen) == (None, [])


@pytest.mark.parametrize("coach", [failing(ProviderError("coach down")), voice("  ")])
def test_a_coach_that_fails_leaves_the_draft_as_it_is(coach: Voice) -> None:
    (example,) = examples("tomi", 1)
    (draft,) = run(with_feedback(voice(WRONG), coach), [job(example)])
    assert (draft.score.value, draft.received) == (0.0, None)
    assert draft.episode.notes["coach_failure"].startswith("judge_error: ")


def test_a_blind_reader_that_finds_the_answer_marks_the_feedback() -> None:
    (example,) = examples("tomi", 1)
    gold = str(example.fields["answer"])

    def clever(context: Sequence[Segment], call: Call) -> str:
        line = next(ln for ln in context[0].text.splitlines() if ln.endswith(f". {gold}"))
        return f"<answer>{line[0]}</answer>"

    reader = Voice(clever)
    policy = FeedbackPolicy(blind_reader=Player(reader), blind_reads=8)
    engine = Engine(cast(voice(WRONG), coach=voice("Look closer.")), feedback=policy)
    (draft,) = run(engine, [job(example)])
    assert draft.received is not None
    assert (draft.received.leak, draft.received.blind) == ("answerable", 1.0)
    assert len({call.sample for call, _ in reader.seen}) == 8
    story = str(example.fields["story"])
    assert all(story not in context[0].text for _, context in reader.seen)


def test_refine_takes_any_feedback() -> None:
    (example,) = examples("tomi", 1)
    engine = Engine(cast(voice(WRONG)))
    feedback = Feedback(text="From elsewhere.", author="someone")
    record = asyncio.run(engine.refine(job(example), feedback))
    assert record.given == feedback
    assert "From elsewhere." in record.prompt


# --- the draft beside the feedback ----------------------------------------------------------------


def test_a_shown_draft_stands_in_the_slot_and_nowhere_else() -> None:
    (example,) = examples("tomi", 1)
    actor = voice(f"<think>zzsecretly</think>{WRONG}")
    policy = FeedbackPolicy(show_draft=True)
    engine = Engine(cast(actor, coach=voice("Read it once more.")), feedback=policy)
    draft, refined = run(engine, [job(example)])
    first, second = (context[0] for _, context in actor.seen)
    assert WRONG in second.text and "Read it once more." in second.text
    assert "zzsecretly" not in second.text
    assert second.bare == first.text and WRONG not in first.text
    assert draft.received is not None and draft.received.text == "Read it once more."
    assert refined.given is not None and WRONG in refined.given.text


def test_a_shown_draft_that_was_right_is_no_leak_of_the_coach() -> None:
    (example,) = examples("tomi", 1)
    gold = f"<answer>{example.fields['answer']}</answer>"
    coach = voice("Read it once more.")
    engine = Engine(cast(voice(gold), coach=coach), feedback=FeedbackPolicy(show_draft=True))
    draft, refined = run(engine, [job(example)])
    assert draft.received is not None and draft.received.leak == ""
    assert gold in refined.prompt


def test_a_shown_dialogue_says_who_spoke() -> None:
    (example,) = examples("secret_keeper", 1)
    actor, partner = voice("That I keep to myself."), Voice(visitor)
    policy = FeedbackPolicy(show_draft=True)
    engine = Engine(cast(actor, partner=partner, coach=voice("Say more.")), feedback=policy)
    _, refined = run(engine, [job(example)])
    assert refined.given is not None
    assert "keeper: That I keep to myself." in refined.given.text
    assert "visitor: Hello" in refined.given.text


# --- deterministic samplers -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    from soulkit.models.local.tiny import build_tiny

    rows = examples("tomi", 6)
    words = [load_registry().task("tomi").preview(e)[0].text for e in rows]
    folder = build_tiny(tmp_path_factory.mktemp("models") / "tiny", words, max_context=600)
    return LocalModel.load(folder)


class Watched(LocalModel):
    """Remembers which calls shared a batch."""

    batches: list[list[str]]

    def _reply(self, batch: list[Any]) -> list[Completion]:
        calls = [r.call for r in batch]
        self.batches.append([f"{c.role}/{c.example_id}/{c.rollout}/{c.kind}" for c in calls])
        return super()._reply(batch)


def slow(seed: int, fails_on: str = "") -> Voice:
    """A coach that takes its time, never the same."""

    class Slow(Voice):
        async def complete(
            self, context: Sequence[Segment], sampling: Sampling, call: Call
        ) -> Completion:
            await asyncio.sleep(naps.random() * 0.03)
            if call.example_id == fails_on:
                raise ZeroDivisionError("a bug")
            return await super().complete(context, sampling, call)

    naps = random.Random(seed)
    return Slow(lambda context, call: "Read it once more.")


def batches(sampler: LocalModel, seed: int, places: int, *, self_coach: bool = False) -> Any:
    model = Watched(sampler.model, sampler.tokenizer, deterministic=True)
    model.batches = []
    player = Player(model, Sampling(max_tokens=4, seed=7))
    coach = player if self_coach else Player(slow(seed))
    engine = Engine(Cast(actor=player, coach=coach), concurrency=places, feedback=FeedbackPolicy())
    jobs = [job(e, i) for e in examples("tomi", 6) for i in range(2)]
    records = asyncio.run(asyncio.wait_for(engine.run(jobs, lambda record: None), 60))
    return model.batches, [(r.key, r.episode.final.logprobs) for r in records if r.episode.final]


@pytest.mark.parametrize("places", [64, 5])
def test_slow_coaches_do_not_change_a_batch(sampler: LocalModel, places: int) -> None:
    first = batches(sampler, 1, places)
    assert batches(sampler, 2, places) == first == batches(sampler, 3, places)
    assert max(map(len, first[0])) == min(places, 12)
    assert sum(map(len, first[0])) == 24


def test_a_model_may_be_its_own_coach(sampler: LocalModel) -> None:
    first = batches(sampler, 1, 5, self_coach=True)
    assert any(name.startswith("coach") for batch in first[0] for name in batch)
    assert batches(sampler, 2, 5, self_coach=True) == first


def test_a_bug_frees_the_others_seats(sampler: LocalModel) -> None:
    model = LocalModel(sampler.model, sampler.tokenizer, deterministic=True)
    player = Player(model, Sampling(max_tokens=4, seed=7))
    rows = examples("tomi", 6)
    engine = Engine(
        Cast(actor=player, coach=Player(slow(1, rows[2].id))), feedback=FeedbackPolicy()
    )

    async def twice() -> list[Record]:
        with pytest.raises(ZeroDivisionError):
            await engine.run([job(e) for e in rows], lambda record: None)
        return await engine.run([job(e) for e in rows[:2]], lambda record: None)

    assert len(asyncio.run(asyncio.wait_for(twice(), 60))) == 4


def test_engines_that_share_a_sampler_share_its_waves(sampler: LocalModel) -> None:
    def played(seed: int) -> list[list[str]]:
        model = Watched(sampler.model, sampler.tokenizer, deterministic=True)
        model.batches = []
        player, rows = Player(model, Sampling(max_tokens=4, seed=7)), examples("tomi", 6)

        async def both() -> None:
            engines = [
                Engine(
                    Cast(actor=player, coach=Player(slow(seed + k))),
                    concurrency=2,
                    feedback=FeedbackPolicy(),
                )
                for k in range(2)
            ]
            shares = (rows[:3], rows[3:])
            await gather(
                engine.run([job(e) for e in share], lambda record: None)
                for engine, share in zip(engines, shares, strict=True)
            )

        asyncio.run(asyncio.wait_for(both(), 60))
        return model.batches

    assert played(1) == played(11) == played(21)
