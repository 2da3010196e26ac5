"""The two forms of a batch: token after token, and a row for each sequence."""

from __future__ import annotations

import torch

from soulkit.train.forward.terms import _Rows


def test_a_batch_has_a_row_for_each_sequence_and_comes_back_as_it_was() -> None:
    owner = torch.tensor([0, 0, 0, 1, 2, 2])
    rows, flat = _Rows(owner, 3), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    square = rows.square(flat)
    assert square.tolist() == [[1.0, 2.0, 3.0], [4.0, 0.0, 0.0], [5.0, 6.0, 0.0]]
    assert torch.equal(rows.flat(square), flat)
