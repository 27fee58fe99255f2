"""What is taken from the paper's table, recomputed by hand."""

from __future__ import annotations

import pytest

from sims.fleet.papers import network_s, said, served_over_probed
from sims.fleets import PAPER_FLEETS


def test_the_networks_share_of_a_token() -> None:
    assert network_s("lan") == pytest.approx(0.12 / 21.5)
    left = [1 / 17.4 - 5 * 0.0052 * 0.81, 1 / 12.8 - 5 * 0.0081 * 0.82, 1 / 8.8 - 5 * 0.0174 * 0.80]
    assert network_s("us-central") == pytest.approx(sum(left) / 3)
    assert 0.39 < network_s("intercontinental") < 0.45


def test_stages_were_served_faster_than_probed_where_the_model_is_large() -> None:
    assert served_over_probed("lan", "Qwen3-8B") == pytest.approx(1.0, abs=0.02)
    us = [served_over_probed("us-central", model) for model in ("Qwen3-8B", "Qwen3-14B", "Qwen3-32B")]
    assert us == sorted(us)
    # By the paper's columns 5 x 20.8 ms x 74%; by equation (2) 104 ms.
    assert us[2] == pytest.approx(0.104 / (5 * 0.0208 * 0.74), rel=0.02)
    # There is no uniform row for this one: the memory-proportional one tells.
    assert served_over_probed("intercontinental", "Qwen3-32B") > 1.2


def test_of_other_fleets_and_models_nothing_is_known() -> None:
    assert served_over_probed("lan", "Qwen3-32B") == 1
    assert served_over_probed("friends", "Qwen3-8B") == 1


def test_what_the_paper_says_in_words_is_complete() -> None:
    paper = said()
    assert set(paper.network_overhead) == set(paper.four_user_gain) == set(PAPER_FLEETS)
    assert paper.setup_s["relay_median"] == 20.8
    assert paper.lead == {"over_uniform": 1.56, "over_memory": 1.25, "over_uniform_four_users": 3.2}
