"""Document boundaries: from columns, and what they isolate, through chunked pipelines in one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stateflow.chunks import ChunkPlan, document_starts
from stateflow.documents import first_tokens_of_columns, first_tokens_of_cu_seqlens, first_tokens_of_ids
from stateflow.pipeline.local import run_local
from tests import cases

# ------------------------------------------------------------------------------------------- columns

lengths_of_documents = st.lists(st.integers(1, 6), min_size=1, max_size=6)


@given(st.lists(lengths_of_documents, min_size=1, max_size=3), st.randoms())
def test_both_columns_give_the_same_marks(rows, random):
    seq_len = max(map(sum, rows))
    rows = [row + [seq_len - sum(row)] * (seq_len > sum(row)) for row in rows]
    expected = torch.zeros(len(rows), seq_len, dtype=torch.bool)
    ids = torch.zeros(len(rows), seq_len, dtype=torch.int64)
    ends = torch.full((len(rows), max(map(len, rows)) + 1), seq_len)
    for b, row in enumerate(rows):
        position = 0
        for number, length in enumerate(row):
            expected[b, position] = True
            # Any number, only different from the preceding document's.
            ids[b, position : position + length] = 2 * random.randrange(100) + number % 2
            ends[b, number] = position
            position += length
    from_ids, from_ends = first_tokens_of_ids(ids), first_tokens_of_cu_seqlens(ends, seq_len)
    assert torch.equal(document_starts(from_ids), document_starts(expected))
    assert torch.equal(document_starts(from_ends), document_starts(expected))
    assert torch.equal(first_tokens_of_cu_seqlens(ends.to(torch.int32), seq_len), from_ends)
    assert torch.equal(first_tokens_of_columns({"document_ids": ids}, len(rows), seq_len), from_ids)
    assert torch.equal(first_tokens_of_columns({"cu_seqlens": ends}, len(rows), seq_len), from_ends)


def test_no_column_and_padding():
    assert first_tokens_of_columns({}, 2, 4) is None
    assert first_tokens_of_columns({"other": torch.zeros(1)}, 2, 4) is None
    marks = first_tokens_of_cu_seqlens(torch.tensor([[0, 2, 4, 4, 4], [0, 1, 1, 3, 4]]), 4)
    assert marks.int().tolist() == [[1, 0, 1, 0], [1, 1, 0, 1]]


REFUSED_COLUMNS = {
    "row 1 begins with 1, not 0": {"cu_seqlens": torch.tensor([[0, 4], [1, 4]])},
    r"row 0 decreases: \[0, 3, 2, 4\]": {"cu_seqlens": torch.tensor([[0, 3, 2, 4], [0, 4, 4, 4]])},
    "row 1 ends with 3, not with the 4 tokens": {"cu_seqlens": torch.tensor([[0, 2, 4], [0, 2, 3]])},
    "row 0 ends with 5, not with the 4 tokens": {"cu_seqlens": torch.tensor([[0, 5], [0, 4]])},
    r"decreases: \[0, 4, -1\]": {"cu_seqlens": torch.tensor([[0, 4, -1], [0, 4, 4]])},
    "cu_seqlens is torch.float32": {"cu_seqlens": torch.zeros(2, 3)},
    r"cu_seqlens is torch.int64 \(3,\); give integers \[B, K\]": {"cu_seqlens": torch.tensor([0, 4, 8])},
    "cu_seqlens is list": {"cu_seqlens": [[0, 4], [0, 4]]},
    r"cu_seqlens is \(1, 2\) beside 2 sequences of 4 tokens; give 2 rows": {"cu_seqlens": torch.tensor([[0, 4]])},
    r"document_ids is \(2, 5\) beside 2 sequences of 4 tokens": {"document_ids": torch.zeros(2, 5, dtype=torch.int64)},
    "document_ids is torch.bool": {"document_ids": torch.zeros(2, 4, dtype=torch.bool)},
    "say the same: drop one": {
        "document_ids": torch.zeros(2, 4, dtype=torch.int64),
        "cu_seqlens": torch.tensor([[0, 4]] * 2),
    },
}


@pytest.mark.parametrize("message", REFUSED_COLUMNS)
def test_columns_that_do_not_fit_are_refused(message):
    with pytest.raises(ValueError, match=message):
        first_tokens_of_columns(REFUSED_COLUMNS[message], 2, 4)


# ----------------------------------------------------------------------------------------- isolation

SEQ_LEN = 24
PLANS = {"5 chunks": [5, 3, 4, 8, 4], "one chunk": [24], "single tokens": [1, 1, 21, 1]}
# A document a span. Against 5 chunks [0 5 8 12 20 24]: edges at a cut, a document that is exactly one chunk, documents
# of one token, and ones over several cuts; the two rows of a batch differ.
LAYOUTS = {
    "at cuts": ([8, 4, 8, 4], [5, 3, 16]),
    "whole chunk, and elsewhere": ([5, 3, 16], [7, 10, 7]),
    "over several cuts": ([3, 18, 3], [1, 22, 1]),
    "single tokens": ([1, 1, 3, 1, 2, 16], [11, 1, 1, 11]),
}
KINDS = {
    "gdn": ["gdn", "gdn"],
    "mamba3": ["mamba3", "mamba3"],
    "attention": ["attention", "attention"],
    "hybrid": ["gdn", "attention"],
}


def make_case(layout, kinds, rope_reset):
    """Tokens of two rows with different documents, document numbers [2, T] unique in the batch, starts."""
    model = cases.make_model(kinds)
    for module in model.modules():
        if hasattr(module, "rope_reset"):
            module.rope_reset = rope_reset
    ids, number = torch.zeros(2, SEQ_LEN, dtype=torch.int64), 0
    for row, lengths in zip(ids, LAYOUTS[layout], strict=True):
        row[:] = torch.repeat_interleave(torch.arange(number, number + len(lengths)), torch.tensor(lengths))
        number += len(lengths)
    tokens, labels = cases.make_batch(2, SEQ_LEN, seed=7)
    return model, tokens, labels, ids, document_starts(first_tokens_of_ids(ids))


def run(model, lengths, tokens, labels, docs):
    """Two stages, one microbatch of both rows; the last hidden states [2, T, D], loss sums and all gradients."""
    plan = ChunkPlan.explicit(SEQ_LEN, lengths)
    stages = cases.make_stages(model, 2, plan)
    for stage in stages:
        stage.module.zero_grad(set_to_none=True)
    hidden = []
    hook = stages[-1].module.norm.register_forward_hook(lambda _m, _args, output: hidden.append(output.detach()))
    schedule = cases.schedule_of("1f1b", 2, 1, plan)
    losses = run_local(schedule, stages, plan, tokens, labels, docs=docs)
    hook.remove()
    grads = {name: g.clone() for name, g in cases.gradients_of(stages).items()}
    return torch.cat(hidden, dim=1), torch.stack([x.detach() for x in losses]), grads


def only(labels, mask):
    return torch.where(mask, labels, -100)


isolation = pytest.mark.parametrize(
    ("layout", "plan", "kinds", "rope_reset"),
    [
        *[("whole chunk, and elsewhere", "5 chunks", kinds, False) for kinds in ("gdn", "mamba3", "attention")],
        *[(layout, "5 chunks", "hybrid", layout == "at cuts") for layout in LAYOUTS],
        *[("over several cuts", plan, "hybrid", True) for plan in ("one chunk", "single tokens")],
        ("over several cuts", "single tokens", "mamba3", False),
    ],
)


@isolation
def test_a_token_changed_in_one_document_changes_no_bit_of_another(layout, plan, kinds, rope_reset):
    model, tokens, labels, ids, docs = make_case(layout, KINDS[kinds], rope_reset)
    for document in ids.unique().tolist():
        inside = ids == document
        changed = tokens.clone()
        row, position = inside.nonzero()[0].tolist()  # its first token, on which all of it depends
        changed[row, position] = (changed[row, position] + 1) % cases.VOCAB
        others = only(labels, ~inside)
        hidden, loss, grads = run(model, PLANS[plan], tokens, others, docs)
        hidden_changed, loss_changed, grads_changed = run(model, PLANS[plan], changed, others, docs)
        assert torch.equal(hidden[~inside], hidden_changed[~inside]), document
        assert not torch.equal(hidden[row, position], hidden_changed[row, position])
        assert torch.equal(loss, loss_changed)
        for name, grad in grads.items():
            assert torch.equal(grad, grads_changed[name]), (document, name)


@isolation
def test_the_gradient_of_a_document_with_respect_to_anothers_tokens_is_exactly_zero(layout, plan, kinds, rope_reset):
    model, tokens, labels, ids, docs = make_case(layout, KINDS[kinds], rope_reset)
    for document in ids.unique().tolist():
        inside = ids == document
        # Its tokens from one half of the vocabulary, all others from the other: a row of the embedding's gradient
        # belongs to one side alone.
        half = cases.VOCAB // 2
        tokens = torch.where(inside, tokens % half, half + tokens % half)
        _, _, grads = run(model, PLANS[plan], tokens, only(labels, inside), docs)
        embedding = grads["tok_embeddings.weight"]
        assert torch.count_nonzero(embedding[half:]) == 0, document
        assert torch.count_nonzero(embedding[tokens[inside].unique()]) > 0, document


def test_without_the_reset_both_would_be_seen():
    """The two tests above would be worth nothing if documents had no influence on each other to begin with."""
    model, tokens, labels, ids, _ = make_case("at cuts", KINDS["hybrid"], False)
    inside = ids == 1
    half = cases.VOCAB // 2
    tokens = torch.where(inside, tokens % half, half + tokens % half)
    joined = torch.zeros_like(ids)
    hidden, _, grads = run(model, PLANS["5 chunks"], tokens, only(labels, inside), joined)
    assert torch.count_nonzero(grads["tok_embeddings.weight"][half:]) > 0
    changed = tokens.clone()
    changed[0, 8] = (tokens[0, 8] + 1) % half
    hidden_changed, _, _ = run(model, PLANS["5 chunks"], changed, labels, joined)
    assert not torch.equal(hidden[0, 12:], hidden_changed[0, 12:])


@pytest.mark.parametrize(("kinds", "rope_reset"), [("hybrid", False), ("hybrid", True), ("mamba3", False)])
def test_a_document_alone_gives_the_same_outputs(kinds, rope_reset):
    """Reset at its start and only there: every document is as if it were the whole sequence."""
    model, tokens, labels, ids, docs = make_case("over several cuts", KINDS[kinds], rope_reset)
    hidden, _, _ = run(model, PLANS["5 chunks"], tokens, labels, docs)
    for document in ids.unique().tolist():
        inside = ids == document
        row = int(inside.nonzero()[0, 0])
        with torch.no_grad():
            alone, _ = cases.as_reference(model)(tokens[row][inside[row]][None])
        torch.testing.assert_close(hidden[inside], alone[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rope_reset", [False, True])
def test_gradients_with_rope_reset_equal_the_unchunked_reference(rope_reset):
    model, tokens, labels, _, docs = make_case("whole chunk, and elsewhere", KINDS["hybrid"], rope_reset)
    _, losses, grads = run(model, PLANS["5 chunks"], tokens, labels, docs)
    reference = cases.as_reference(model)
    for module in reference.modules():
        if hasattr(module, "rope_reset"):
            module.rope_reset = rope_reset
    loss = cases.reference_cross_entropy(reference(tokens, attention_masks=docs), labels)
    loss.backward()
    assert losses.sum().item() == pytest.approx(loss.item(), rel=1e-12)
    worst, name = cases.largest_difference(grads, {name: p.grad for name, p in reference.named_parameters()})
    assert worst <= 1e-10, (name, worst)


@pytest.mark.parametrize("kinds", ["hybrid", "mamba3"])
def test_no_boundary_is_as_if_there_were_no_documents(kinds):
    model, tokens, labels, ids, _ = make_case("at cuts", KINDS[kinds], False)
    without = run(model, PLANS["5 chunks"], tokens, labels, None)
    zeros = run(model, PLANS["5 chunks"], tokens, labels, torch.zeros_like(ids))
    assert torch.equal(without[0], zeros[0]) and torch.equal(without[1], zeros[1])
    for name, grad in without[2].items():
        assert torch.equal(grad, zeros[2][name]), name
