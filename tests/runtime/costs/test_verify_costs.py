"""The probe measures what verifying drafts adds to a decode."""

from __future__ import annotations

import pytest

from tests.runtime.costs.test_cost_probe import Device, make_space, measure


def test_it_finds_what_verifying_drafts_costs() -> None:
    """A token takes 0.1 ms on this device. A step has at most 64 rows of logits.

    The probe tries 1, 4, 16 and 64 sequences. 16 sequences of 8 verified tokens would need 128
    rows, so the probe ends with 4 sequences.
    """
    device = Device(make_space(verified_tokens=(2, 4, 8), max_num_seqs=16))
    table = measure(device)
    assert (table.verify_tokens, table.verify_seqs) == ((2, 4, 8), (1, 4))
    for num_seqs, num_drafts in ((1, 1), (1, 5), (4, 4), (4, 28), (8, 56)):
        surcharge = table.verify_surcharge(num_seqs, num_drafts)
        assert surcharge == pytest.approx(num_drafts * 1e-4, rel=1e-6)
    assert measure(Device(make_space())).verify == ()
