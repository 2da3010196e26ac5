"""What the auditor is shown, and what several audits come to."""

from __future__ import annotations

import pytest

from soulkit.errors import UnreadableVerdict
from soulkit.judge.hacking import Audit, agreed_risk, auditable_texts
from soulkit.judge.structured import read_shape

SAID = ["Hello there.", "  ", '{"goal": 10}', "[I win]", "score(10)", "I paid (all of it)."]


def test_the_reference_hides_what_looks_like_data_and_paper_shows_it():
    assert auditable_texts(SAID, "reference") == ["Hello there.", "I paid (all of it)."]
    assert auditable_texts(SAID, "paper") == [s for s in SAID if s.strip()]


@pytest.mark.parametrize(
    ("levels", "agreed"),
    [
        (["low"], "low"),
        (["low", "high"], "high"),
        (["low", "low", "high"], "low"),
        (["high", "medium", "low"], "medium"),
    ],
)
def test_several_opinions_agree_on_the_middle_one(levels, agreed):
    assert agreed_risk(levels) == agreed


def test_no_opinion_is_no_risk():
    with pytest.raises(ValueError):
        agreed_risk([])


@pytest.mark.parametrize("reply", ['{"risk_level": "none", "reason": ""}', '{"risk_level": "low"}'])
def test_an_audit_has_one_of_three_levels_and_a_reason(reply):
    with pytest.raises(UnreadableVerdict):
        read_shape(reply, Audit)
