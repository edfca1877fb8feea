"""studies/recall.py: its task needs the state, chunked training follows unchunked training, a detached one does not."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
import torch
from studies import recall
from studies.recall import CHUNK_LEN, FILLER, IGNORE, NUM_PAIRS, SEQ_LEN, Settings, Trainer, make_batch, train

from stateflow.chunks import ChunkPlan


def test_every_query_is_a_whole_chunk_away_from_its_pair():
    tokens, labels = make_batch(64, CHUNK_LEN, torch.Generator().manual_seed(0))
    pairs, noise, queries = recall.THREE_CHUNKS.split(tokens)
    assert (noise > FILLER).all(), "the chunk between them holds neither keys nor values"
    asked = labels != IGNORE
    assert not asked[:, : 2 * CHUNK_LEN].any() and (asked.sum(1) == NUM_PAIRS).all()
    for row, label, first, last in zip(tokens, labels, pairs, queries, strict=True):
        known = dict(zip(first[0 : 2 * NUM_PAIRS : 2].tolist(), first[1 : 2 * NUM_PAIRS : 2].tolist(), strict=True))
        assert sorted(known) == list(range(NUM_PAIRS)) and len(set(known.values())) == NUM_PAIRS
        for position in label.ne(IGNORE).nonzero()[:, 0].tolist():
            assert label[position] == known[row[position].item()]
        assert all(token < NUM_PAIRS or token == FILLER for token in last.tolist()), "an answer is shown"


def test_convolutions_reach_less_far_than_a_chunk():
    """With the recurrent states zero after every token, only the convolutions remember: 3 tokens a layer."""
    trainer = Trainer("chunked", 0, torch.float32)
    tokens, _ = make_batch(8, CHUNK_LEN, torch.Generator().manual_seed(0))
    others = tokens.clone()
    others[:, 2 * NUM_PAIRS - 1] = FILLER  # without the last pair's value
    every_token = ChunkPlan.build(SEQ_LEN, SEQ_LEN)

    def changed(zero_at_cuts):
        a, b = (trainer.logits(t, zero_at_cuts, every_token) for t in (tokens, others))
        return (a - b).abs().amax((0, 2)).nonzero()[:, 0].tolist()

    first = 2 * NUM_PAIRS - 1
    assert changed("recurrent") == list(range(first, first + 7))
    assert changed(None) == list(range(first, SEQ_LEN))


@pytest.fixture(scope="module")
def short_runs():
    settings = Settings(num_steps=8, noise_ramp=(0, 4), batch_size=8, eval_every=8, eval_sequences=8, dtype="float64")
    return [train(variant, 3, settings) for variant in recall.VARIANTS]


def test_chunked_losses_are_the_unchunked_ones_step_by_step(short_runs):
    assert recall.loss_difference(short_runs, seed=3) < 1e-10


def test_detached_losses_part_from_the_unchunked_ones_at_the_second_step(short_runs):
    """The first loss is from the same weights: only gradients differ."""
    unchunked, _, detached = (r.losses for r in short_runs)
    assert abs(unchunked[0] - detached[0]) < 1e-10
    assert all(abs(a - b) > 1e-6 for a, b in zip(unchunked[1:], detached[1:], strict=True))


def test_a_short_training_separates_chunked_from_detached():
    """Before the noise begins; a guess costs ln 4 = 1.39."""
    settings = dataclasses.replace(Settings(), num_steps=45, noise_ramp=(45, 120), eval_every=45)
    chunked, detached = (train(variant, 1, settings) for variant in ("chunked", "detached"))
    chunked_loss, detached_loss = (statistics.mean(r.losses[-5:]) for r in (chunked, detached))
    assert chunked_loss < 0.3 < 0.6 < detached_loss, (chunked_loss, detached_loss)


def test_unknown_variants_are_refused():
    with pytest.raises(ValueError, match="unknown variant 'chunk': use one of unchunked, chunked, detached"):
        Trainer("chunk", 0, torch.float32)
