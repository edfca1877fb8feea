"""studies/balance.py: an exchange moves attention and nothing else, and the table says what was simulated."""

from __future__ import annotations

import dataclasses
import json

import pytest
from studies import balance
from studies.balance import Sizes, make_job, study

from stateflow.pipeline.schedule import Action, Kind
from stateflow.planning.analytic import Analytic
from stateflow.planning.devices import DEVICES

SIZES = Sizes(num_ranks=2, num_microbatches=2, num_chunks=4)
DEVICE = dataclasses.replace(DEVICES["h200"], launch_seconds=0.0)


@pytest.mark.parametrize("pattern", balance.PATTERNS)
def test_an_exchange_spreads_attention_and_keeps_the_work(pattern):
    analytic = Analytic(make_job(pattern, 32, "zero_bubble", 1, SIZES), DEVICE)
    plan = analytic.job.plan(SIZES.num_chunks, 0.0)
    own, exchanged = analytic.cost(plan), analytic.exchanged_cost(plan)
    schedule = analytic.schedule("zero_bubble", SIZES.num_chunks)
    actions = [action for row in schedule.table for action in row]
    assert sum(map(exchanged, actions)) == pytest.approx(sum(map(own, actions)))
    chunks = [Action(1, Kind.F, 0, chunk) for chunk in range(SIZES.num_chunks)]
    assert len({exchanged(action) for action in chunks}) == 1  # equal chunks of equal stages
    assert [own(action) for action in chunks] == sorted(own(action) for action in chunks)
    assert (own(chunks[0]) < own(chunks[-1])) == (pattern != "no attention")
    weights = Action(0, Kind.W, 0, 1)
    assert exchanged(weights) == pytest.approx(own(weights))  # there is no attention in them


def test_without_attention_there_is_nothing_to_exchange():
    found = {result.name: result for result in study("no attention", 32, SIZES, (0.0, 1.0))}
    plain, exchange = found["1f1b, equal"], found["1f1b, exchange"]
    assert plain.efficiency == pytest.approx(exchange.efficiency) and found["1f1b, skewed"].skew == 0
    # eq. 15: M + (P - 1) / N microbatches' time for M, but for the messages.
    assert plain.efficiency == pytest.approx(2 / 2.25, rel=0.02)


def test_with_attention_skew_helps_and_an_exchange_more():
    found = {result.name: result for result in study("all attention", 128, SIZES, (0.0, 1.0))}
    plain, skewed, exchange = (found[f"1f1b, {how}"].efficiency for how in ("equal", "skewed", "exchange"))
    assert plain + 0.05 < skewed < exchange < 1 and found["1f1b, skewed"].skew > 0


def test_the_files(tmp_path):
    pytest.importorskip("matplotlib")
    paths = [tmp_path / name for name in ("a.json", "a.md", "a.svg")]
    files = [f"--{kind}={path}" for kind, path in zip(("json", "table", "plot"), paths, strict=True)]
    call = ["--ranks", "2", "--microbatches", "2", "--num-chunks", "2", "--contexts", "4", "--patterns", "1 of 4"]
    balance.main([*call, *files])
    results = json.loads(paths[0].read_text())["results"]
    assert len(results) == len(balance.ARRANGEMENTS)
    for result in results:
        assert f"{100 * result['efficiency']:.1f}" in paths[1].read_text()
    assert "1 of 4" in paths[2].read_text()


def test_stages_must_be_equal():
    with pytest.raises(ValueError, match="32 layers are not cut evenly into 3 stages"):
        make_job("1 of 4", 32, "1f1b", 1, Sizes(num_ranks=3))
