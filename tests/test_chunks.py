"""Chunk plans, the cost model behind them, and documents and labels across cuts."""

import contextlib
import math
import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stateflow.chunks import (
    ChunkCost,
    ChunkPlan,
    check_documents,
    chunk_documents,
    default_multiple,
    document_starts,
    shift_labels,
)

coefficients = st.floats(1e-3, 1e6)
skews = st.floats(0, 2)


@st.composite
def sizes(draw, max_tokens=5000):
    seq_len = draw(st.integers(1, max_tokens))
    return seq_len, draw(st.integers(1, min(seq_len, 40)))


# ---- costs and balanced boundaries


@settings(max_examples=50)
@given(sizes(), coefficients, coefficients)
def test_balanced_chunks_cost_the_same(size, linear, quadratic):
    seq_len, num_chunks = size
    cost = ChunkCost(linear, quadratic)
    cuts = cost.balanced_boundaries(seq_len, num_chunks)
    # Eq. 9 written out here, so that a slip in ChunkCost.cost shows.
    costs = [
        linear * (stop - start) + quadratic * (start * (stop - start) + (stop - start) ** 2 / 2)
        for start, stop in zip(cuts, cuts[1:], strict=False)
    ]
    share = (linear * seq_len + quadratic * seq_len**2 / 2) / num_chunks
    # A chunk's cost is a difference of cumulative costs, so rounding errors scale with the whole sequence.
    assert costs == pytest.approx([share] * num_chunks, rel=1e-9)
    assert (cuts[0], cuts[-1]) == (0.0, seq_len)
    assert costs == pytest.approx([cost.cost(a, b - a) for a, b in zip(cuts, cuts[1:], strict=False)])


def test_balanced_boundaries_of_pure_attention_are_square_roots():
    cuts = ChunkCost(0.0, 3.0).balanced_boundaries(100, 4)
    assert cuts == pytest.approx([0, 50, 100 * math.sqrt(0.5), 100 * math.sqrt(0.75), 100], rel=1e-14)


@given(sizes(), coefficients)
def test_without_attention_balanced_chunks_are_equal(size, linear):
    seq_len, num_chunks = size
    cuts = ChunkCost(linear, 0.0).balanced_boundaries(seq_len, num_chunks)
    assert cuts == pytest.approx([i * seq_len / num_chunks for i in range(num_chunks + 1)], rel=1e-12)


# ---- plans


@given(sizes(), st.floats(0, 1), coefficients, coefficients)
def test_built_plan_is_a_rounded_partition(size, skew, linear, quadratic):
    seq_len, num_chunks = size
    assume(seq_len >= 2 * num_chunks or skew == 0)
    plan = ChunkPlan.build(seq_len, num_chunks, skew, ChunkCost(linear, quadratic))
    assert plan.num_chunks == num_chunks and plan.seq_len == seq_len
    assert sum(plan.lengths) == seq_len and min(plan.lengths) > 0
    multiple = default_multiple(seq_len, num_chunks)
    assert all(cut % multiple == 0 for cut in plan.boundaries[:-1])
    balanced = ChunkCost(linear, quadratic).balanced_boundaries(seq_len, num_chunks)
    for i, cut in enumerate(plan.boundaries[:-1]):
        wanted = (1 - skew) * i * seq_len / num_chunks + skew * balanced[i]
        assert abs(cut - wanted) <= multiple / 2 * (1 + 1e-9), "not the nearest multiple"


@given(sizes())
def test_default_multiple_follows_the_documented_rule(size):
    seq_len, num_chunks = size
    multiple = default_multiple(seq_len, num_chunks)
    fitting = [m for m in (1, 2, 4, 8, 16, 32, 64, 128) if 2 * m * num_chunks <= seq_len]
    assert multiple == max(fitting, default=1)


@pytest.mark.parametrize("multiple", [1, 8, 128])
def test_the_default_multiple_fits_just_twice_into_an_average_chunk(multiple):
    assert default_multiple(2 * multiple * 7, 7) == multiple
    assert default_multiple(2 * multiple * 7 - 1, 7) == max(1, multiple // 2)


@given(sizes())
def test_skew_zero_and_default_rounding_work_for_every_size(size):
    plan = ChunkPlan.build(*size)
    assert max(plan.lengths) - min(plan.lengths) <= 2 * default_multiple(*size)


def test_plans_of_the_headline_sizes():
    cost = ChunkCost(1.0, 1 / 65536)
    assert ChunkPlan.build(131072, 8).lengths == (16384,) * 8
    assert ChunkPlan.build(131072, 4, 1.0, cost).boundaries == (0, 48000, 81024, 107904, 131072)
    assert ChunkPlan.build(131072, 4, 0.75, cost).boundaries == (0, 44160, 77184, 105472, 131072)
    assert ChunkPlan.build(1000, 3).boundaries == (0, 384, 640, 1000)
    assert ChunkPlan.build(5, 4).boundaries == (0, 1, 3, 4, 5)
    assert ChunkPlan.build(7, 7).lengths == (1,) * 7


def test_skew_moves_boundaries_from_equal_past_balanced():
    cost = ChunkCost(1.0, 1e-3)
    balanced = cost.balanced_boundaries(100_000, 4)
    cuts = [ChunkPlan.build(100_000, 4, skew, cost, multiple=1).boundaries for skew in (0, 0.5, 1, 1.25)]
    for i in (1, 2, 3):
        equal = 25_000 * i
        assert [c[i] for c in cuts] == [
            round(equal + skew * (balanced[i] - equal)) for skew in (0, 0.5, 1, 1.25)
        ]
        assert cuts[0][i] < cuts[1][i] < cuts[2][i] < cuts[3][i]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12))
def test_explicit_lengths_come_back(lengths):
    plan = ChunkPlan.explicit(sum(lengths), lengths)
    assert plan.lengths == tuple(lengths)
    x_BTD = torch.arange(2 * sum(lengths) * 3).view(2, -1, 3)
    pieces = plan.split(x_BTD)
    assert [p.shape[1] for p in pieces] == lengths
    assert torch.equal(torch.cat(pieces, dim=1), x_BTD)
    for i, piece in enumerate(pieces):
        start, stop = plan.span(i)
        assert torch.equal(piece, x_BTD[:, start:stop])
    assert torch.equal(plan.split(x_BTD.transpose(0, 1), dim=0)[-1], pieces[-1].transpose(0, 1))


def test_plan_prints_its_lengths():
    assert str(ChunkPlan.build(8192, 4)) == "8192 tokens = 4 x 2048"
    assert str(ChunkPlan.explicit(10, [5, 3, 2])) == "10 tokens = 5 + 3 + 2"
    assert hash(ChunkPlan.explicit(10, [5, 5])) == hash(ChunkPlan.build(10, 2, multiple=5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ChunkPlan.build(0, 1), "seq_len 0 must be at least 1"),
        (lambda: ChunkPlan.build(8, 0), "num_chunks 0 must be at least 1"),
        (lambda: ChunkPlan.build(8, 9), "num_chunks 9 is more than the 8 tokens; give at most 8"),
        (lambda: ChunkPlan.build(8, 2, -0.1, ChunkCost(1, 1)), "skew -0.1 .* nearest that works is 0.0"),
        (lambda: ChunkPlan.build(8, 2, 2.5, ChunkCost(1, 1)), "skew 2.5 .* nearest that works is 2.0"),
        (lambda: ChunkPlan.build(8, 2, math.nan, ChunkCost(1, 1)), "skew nan"),
        (lambda: ChunkPlan.build(8, 2, 0.5), "skew 0.5 needs the cost .* or skew 0"),
        (lambda: ChunkPlan.build(8, 2, multiple=0), "multiple 0 must be at least 1"),
        (lambda: ChunkPlan.build(100, 10, multiple=64), "multiple 8 or num_chunks 2 works"),
        (lambda: ChunkPlan.explicit(10, []), "num_chunks 0"),
        (lambda: ChunkPlan.explicit(10, [5, 4]), "sum to 9, the sequence has 10 tokens; add 1 to them"),
        (lambda: ChunkPlan.explicit(10, [5, 7]), "sum to 12, the sequence has 10 tokens; take 2 from them"),
        (lambda: ChunkPlan.explicit(10, [10, 0]), "length 0 of chunk 1 must be at least 1"),
        (lambda: ChunkPlan.explicit(10, [12, -2]), "length -2 of chunk 1"),
        (lambda: ChunkPlan((0,)), "hold no chunk"),
        (lambda: ChunkPlan((1, 5)), "start at 1; the first one must be 0"),
        (lambda: ChunkPlan((0, 5, 5)), "boundary 5 after 5 leaves chunk 1 empty; it must be at least 6"),
        (lambda: ChunkPlan((0, 5)).span(1), r"chunk 1 is not one of the 1; give 0 .. 0"),
        (lambda: ChunkPlan((0, 5)).split(torch.zeros(2, 6)), "dimension 1 .* 6 tokens; .* of 5"),
        (lambda: ChunkCost(-1.0, 1.0), "linear cost -1.0"),
        (lambda: ChunkCost(1.0, math.inf), "quadratic cost inf"),
        (lambda: ChunkCost(0.0, 0.0), "both 0; give linear=1.0"),
    ],
)
def test_refusals_name_the_value_and_a_fix(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@settings(max_examples=50)
@given(sizes(max_tokens=120), skews, coefficients, coefficients, st.integers(1, 200))
def test_a_suggested_fix_works_and_is_the_least_change(size, skew, linear, quadratic, multiple):
    cost = ChunkCost(linear, quadratic)
    try:
        ChunkPlan.build(*size, skew, cost, multiple)
    except ValueError as error:
        fixes = dict(re.findall(r"(multiple|num_chunks) (\d+)(?: or| works)", str(error)))
    else:
        assume(False)
    fewer = int(fixes["num_chunks"])
    assert ChunkPlan.build(size[0], fewer, skew, cost, multiple).num_chunks == fewer
    for more in range(fewer + 1, size[1]):
        with pytest.raises(ValueError, match="empty"):
            ChunkPlan.build(size[0], more, skew, cost, multiple)
    works = []
    for smaller in (m for m in (1, 2, 4, 8, 16, 32, 64, 128) if m < multiple):
        with contextlib.suppress(ValueError):
            works.append(ChunkPlan.build(*size, skew, cost, smaller) and smaller)
    assert int(fixes.get("multiple", 0)) == max(works, default=0)


# ---- documents and labels


@given(st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=3), st.data())
def test_document_starts_and_their_chunks(marks, data):
    doc_start_BT = document_starts(torch.tensor(marks))
    assert doc_start_BT.dtype == torch.int64
    cut = data.draw(st.integers(1, 8))
    parts = [chunk_documents(doc_start_BT, *span) for span in ((0, cut), (cut, 9))]
    for b, row in enumerate(marks):
        for t in range(9):
            start = max((s for s in range(t + 1) if row[s]), default=0)
            assert doc_start_BT[b, t] == start
            chunk_start, part = (0, parts[0]) if t < cut else (cut, parts[1])
            assert part[b, t - chunk_start] == start - chunk_start


def test_document_helpers_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match=r"torch.int64 of shape \(1, 3\); give torch.bool"):
        document_starts(torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"torch.bool of shape \(3,\)"):
        document_starts(torch.zeros(3, dtype=torch.bool))
    for start, stop in ((2, 2), (-1, 2), (1, 4)):
        with pytest.raises(ValueError, match=re.escape(f"chunk [{start}, {stop}) must")):
            chunk_documents(torch.zeros(1, 3, dtype=torch.int64), start, stop)
    with pytest.raises(ValueError, match=r"torch.bool of shape \(1, 3\); give int64"):
        chunk_documents(torch.zeros(1, 3, dtype=torch.bool), 0, 2)


@given(st.lists(st.booleans(), min_size=9, max_size=9), st.integers(0, 8))
def test_documents_of_any_chunk_are_accepted(marks, start):
    check_documents(chunk_documents(document_starts(torch.tensor([marks])), start, 9), 1, 9 - start)


@pytest.mark.parametrize(
    ("docs", "message"),
    [
        ([[0, 1, 1], [0, 0, 3]], "docs[1, 2] = 3: this token's document starts at the token (2) or with the document "
         "of the token before it (0)"),
        ([[5, 5, 5], [0, 0, 0]], "docs[0, 0] = 5: this token's document starts at the token (0) or before it (< 0)"),
        ([[-1, 1, 0], [0, 0, 0]], "docs[0, 2] = 0"),
        ([[-2, -2, -3], [0, 0, 0]], "docs[0, 2] = -3"),
        ([[0.0, 0, 0], [0, 0, 0]], "docs is torch.float32 of shape (2, 3), but must be int64 (2, 3)"),
        ([[False] * 3] * 2, "docs is torch.bool of shape (2, 3)"),
        ([[0, 0]] * 2, "docs is torch.int64 of shape (2, 2), but must be int64 (2, 3)"),
    ],
)  # fmt: skip
def test_documents_that_cannot_be_are_named(docs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_documents(torch.tensor(docs), 2, 3)


def test_documents_without_values_to_look_at_pass():
    check_documents(None, 2, 3)
    check_documents(torch.full((2, 3), 7, device="meta", dtype=torch.int64), 2, 3)
    with torch._subclasses.FakeTensorMode():
        check_documents(torch.full((2, 3), 7), 2, 3)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_labels_are_shifted_over_the_whole_sequence(dtype):
    tokens_BT = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]], dtype=dtype)
    labels_BT = shift_labels(tokens_BT)
    assert labels_BT.dtype == torch.int64
    assert labels_BT.tolist() == [[6, 7, 8, -100], [2, 3, 4, -100]]
    assert shift_labels(tokens_BT, ignore_index=-1)[0, -1] == -1
    # The label of a chunk's last token is the first token of the next chunk.
    assert ChunkPlan.explicit(4, [2, 2]).split(labels_BT)[0].tolist() == [[6, 7], [2, 3]]
