"""Tables of plans: what is written is read again, and every call finds the nearest entry that fits its kernels."""

import dataclasses
import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stateflow_kernels import gated_delta_rule as launcher
from stateflow_kernels import hopper, plans
from stateflow_kernels.gated_delta_rule import Plan, Tile, default_plan
from stateflow_kernels.mamba3_rule import Mamba3Plan
from stateflow_kernels.plan_table import (
    Entry,
    Environment,
    Shape,
    Table,
    bucket_of,
    check_plan,
    from_json,
    load,
    normalized,
    numbers_of,
    save,
    to_json,
)

HERE = Environment("nvidia_h200", "2.11", "3.6.0", "12.8.93")
GPU = torch.device("cuda", 0)

tiles = st.builds(Tile, st.sampled_from((16, 32, 64, 128)), st.sampled_from((4, 8)), st.integers(1, 4))
cuts = st.lists(st.floats(0.01, 0.99), max_size=3, unique=True).map(lambda values: tuple(sorted(values)))
a_plan = st.builds(
    Plan,
    **{f.name: tiles for f in dataclasses.fields(Plan) if isinstance(f.default, Tile)},
    cuts=cuts,
    backward_cuts=cuts,
    overlap_backward=st.booleans(),
)
shapes = st.builds(
    lambda key_heads, group, *rest: Shape("gated_delta_rule", key_heads * group, key_heads, *rest),
    st.integers(1, 40),
    st.integers(1, 4),
    st.sampled_from((64, 128)),
    st.sampled_from((64, 128)),
    st.sampled_from(("bfloat16", "float16")),
    st.integers(1, 4),
    st.integers(4, 18).map(lambda n: 1 << n),
)
tables = st.dictionaries(shapes, a_plan, max_size=6).map(
    lambda found: Table(HERE, tuple(Entry(shape, plan) for shape, plan in found.items()), "a table")
)


def shape(heads: int = 20, tokens: int = 8192, **changes) -> Shape:
    return dataclasses.replace(Shape("gated_delta_rule", heads, heads, 128, 128, "bfloat16", 1, tokens), **changes)


def plan(stages: int) -> Plan:
    """One that can be told from others."""
    return Plan(pre=Tile(32, 8, stages))


@given(a_plan)
def test_plans_survive_json(value):
    check_plan(value)
    assert from_json(Plan, json.loads(json.dumps(to_json(value)))) == value


@given(tables, shapes)
def test_the_nearest_entry_that_fits(table, wanted):
    entry = table.nearest(wanted)
    fitting = [e for e in table.entries if e.shape.applies_to(wanted)]
    if not fitting:
        assert entry is None
        return
    assert (entry.shape.k_dim, entry.shape.v_dim, entry.shape.dtype) == (wanted.k_dim, wanted.v_dim, wanted.dtype)
    assert all(entry.shape.distance(wanted) <= e.shape.distance(wanted) for e in fitting)
    if wanted in [e.shape for e in fitting]:
        assert entry.shape == wanted


@given(st.integers(1, 2**20))
def test_buckets(num_tokens):
    bucket = bucket_of(num_tokens)
    assert bucket & (bucket - 1) == 0
    assert abs(math.log2(bucket / num_tokens)) <= 0.5


def test_names_and_versions():
    assert normalized("NVIDIA H200") == "nvidia_h200"
    assert normalized("NVIDIA A100-SXM4-80GB") == "nvidia_a100_sxm4_80gb"
    assert numbers_of("2.11.0+cu130", 2) == "2.11" and numbers_of("3.6.0", 3) == "3.6.0"


def test_saving_adds_to_the_file_and_replaces_what_it_measured_again(tmp_path):
    path = tmp_path / "new" / "table.json"
    save(path, HERE, [Entry(shape(), plan(1), {"forward_ms": 1.5}), Entry(shape(10), plan(2))])
    save(path, HERE, [Entry(shape(10), plan(3)), Entry(shape(8), plan(4))])
    table = load(path)
    assert table.environment == HERE
    assert {e.shape.num_heads: e.plan.pre.num_stages for e in table.entries} == {20: 1, 10: 3, 8: 4}
    assert {e.shape.num_heads: e.evidence for e in table.entries}[20] == {"forward_ms": 1.5}
    other = dataclasses.replace(HERE, triton="3.7.1")
    with pytest.raises(ValueError, match="is a table for nvidia_h200.*name another file"):
        save(path, other, [])
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("torch"), "'torch' is missing"),
        (lambda c: c["entries"][0]["shape"].update(family="mamba9"), "unknown family 'mamba9'"),
        (lambda c: c["entries"][0]["shape"].update(batch=0), "is no shape"),
        (lambda c: c["entries"][0]["shape"].update(dtype="float17"), "is no shape"),
        (lambda c: c["entries"][0]["shape"].pop("tokens"), "tokens"),
        (lambda c: c["entries"][0]["plan"]["pre"].update(block_v=48), "pre: block_v = 48 must be a power of two"),
        (lambda c: c["entries"][0]["plan"]["pre"].update(num_stages=9), "num_stages = 9 from 1 to 8"),
        (lambda c: c["entries"][0]["plan"].update(prae={}), "must be a table with the keys pre, transition"),
        (lambda c: c["entries"][0]["plan"].update(cuts=[0.5, 0.5]), "must be shares between 0 and 1 that increase"),
        (lambda c: c["entries"][0]["plan"].update(overlap_backward=1), "1 must be of type bool"),
    ],
)
def test_what_is_no_table(change, message, tmp_path):
    path = tmp_path / "table.json"
    save(path, HERE, [Entry(shape(), Plan())])
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"table.json is no table of plans: .*{message}"):
        load(path)


def test_a_missing_and_a_broken_file(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        load(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"device": ')
    with pytest.raises(ValueError, match="is no table of plans"):
        load(tmp_path / "half.json")


@pytest.fixture
def on_gpu(monkeypatch, tmp_path):
    """A machine with one H200, its own empty folders of tables and nothing else."""
    monkeypatch.setattr(plans, "_device_name", lambda device: "nvidia_h200")
    monkeypatch.setattr(plans, "_environment", lambda name: dataclasses.replace(HERE, device=name))
    monkeypatch.setattr(plans, "shared_memory_of", lambda device: 101_376)
    monkeypatch.setattr(plans, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(plans.VARIABLE, raising=False)
    plans.reload()
    yield tmp_path
    plans.reload()


def look_up(**changes) -> Plan:
    options = dict(device=GPU, dtype=torch.bfloat16, batch=1, num_tokens=8192, num_heads=20, k_dim=128, v_dim=128)
    return plans.plan_for("gated_delta_rule", **(options | changes))


def ship(folder, name: str, environment: Environment, stages: int) -> None:
    save(folder / "shipped" / f"{name}.json", environment, [Entry(shape(), plan(stages))])
    plans.reload()


def test_the_order_of_the_tables(on_gpu, monkeypatch, capsys):
    assert look_up() == default_plan(128, 128, torch.bfloat16, 101_376)
    ship(on_gpu, "c", dataclasses.replace(HERE, device="nvidia_b200"), 1)
    assert look_up() == default_plan(128, 128, torch.bfloat16, 101_376)
    ship(on_gpu, "a", dataclasses.replace(HERE, torch="2.13"), 2)
    assert look_up() == plan(2)
    assert "measured with other versions than here" in plans.table_entries()[0]
    ship(on_gpu, "b", HERE, 3)
    assert look_up() == plan(3)
    assert "other versions" not in plans.table_entries()[0] and "other versions" in plans.table_entries()[2]
    save(plans.user_table_path(HERE), HERE, [Entry(shape(), plan(4))])
    plans.reload()
    assert look_up() == plan(4)
    assert plans.user_table_path(HERE).is_relative_to(on_gpu / "cache" / "stateflow")
    save(on_gpu / "mine.json", HERE, [Entry(shape(), plan(5))])
    monkeypatch.setenv(plans.VARIABLE, str(on_gpu / "mine.json"))
    plans.reload()
    assert look_up() == plan(5)
    assert plans.choice_for(shape(), GPU).shape == shape()
    assert "mine.json" in str(plans.choice_for(shape(), GPU))
    # A table that does not fit this K, V or type is passed by.
    for changes in (dict(k_dim=64), dict(v_dim=64), dict(dtype=torch.float16)):
        wanted = dict(k_dim=128, v_dim=128, dtype=torch.bfloat16) | changes
        assert look_up(**changes) == default_plan(**wanted, shared_memory=101_376)


def test_walks_in_segments(on_gpu):
    """A plan that was measured for them, or else that of the exact order with wide walks."""
    assert look_up(num_segments=6) == dataclasses.replace(look_up(), num_segments=6)
    walks = {name: Tile(32, 4, 2, specialized=True) for name in plans.WIDE_WALKS}
    exact = Plan(**walks, cuts=(0.5,), overlap_backward=True)
    path = plans.user_table_path(HERE)
    save(path, HERE, [Entry(shape(), exact)])
    plans.reload()
    assert look_up() == exact and look_up(num_segments=6) == Plan(**plans.WIDE_WALKS, num_segments=6)
    save(path, HERE, [Entry(shape(segments=5), dataclasses.replace(plan(3), num_segments=5))])
    plans.reload()
    assert look_up() == exact and look_up(num_segments=6) == dataclasses.replace(plan(3), num_segments=6)
    assert plans.choice_for(shape(segments=6), GPU).shape.segments == 5
    # A plan with segments for a shape without: the exact order is a promise.
    save(path, HERE, [Entry(shape(), dataclasses.replace(plan(3), num_segments=5))])
    plans.reload()
    assert look_up() == plan(3)


def test_many_walks_have_short_load_pipelines(on_gpu, monkeypatch):
    monkeypatch.setattr(plans.hopper, "available", lambda device: True)
    monkeypatch.setattr(plans.hopper_mamba3, "num_multiprocessors", lambda device: 132)

    def stages(num_heads: int, batch: int = 1) -> tuple[int, int]:
        plan = plans.fallback_plan(GPU, torch.bfloat16, 128, 64, "mamba3", batch * num_heads)
        assert plans.choice_for(Shape("mamba3", num_heads, 1, 128, 64, "bfloat16", batch, 8192, 32), GPU).plan == plan
        return plan.scan.num_stages, plan.scan_backward.num_stages

    assert [stages(heads) for heads in (24, 40, 80)] == [(8, 8), (8, 8), (4, 4)]
    assert stages(40, batch=2) == (4, 4)
    assert plans.fallback_plan(GPU, torch.bfloat16, 128, 64, "mamba3").scan.num_stages == 8


def test_any_length_and_number_of_heads_finds_an_entry(on_gpu):
    entries = [Entry(shape(heads, tokens), Plan(pre=Tile(32, 4, i + 1))) for i, (heads, tokens) in enumerate(
        [(20, 8192), (20, 32768), (10, 8192)]
    )]  # fmt: skip
    save(plans.user_table_path(HERE), HERE, entries)
    plans.reload()
    stages = [look_up(num_tokens=n).pre.num_stages for n in (1, 100, 8192, 16384 - 4000, 30_000, 10**6)]
    assert stages == [1, 1, 1, 1, 2, 2]
    assert [look_up(num_heads=heads).pre.num_stages for heads in (1, 12, 16, 64)] == [3, 3, 1, 1]
    assert look_up(num_heads=10, batch=2).pre.num_stages == 1, "as many independent walks as 20 heads"
    assert look_up(num_heads=20, num_key_heads=5).pre.num_stages == 1


def test_the_lookup_reads_nothing_twice(on_gpu, monkeypatch):
    ship(on_gpu, "b", HERE, 3)
    look_up()
    monkeypatch.setattr(plans, "load", lambda path: pytest.fail("read again"))
    assert look_up(num_tokens=8000) == plan(3)


def test_a_broken_table_in_the_cache_is_ignored_and_a_named_one_refused(on_gpu, monkeypatch, caplog):
    path = plans.user_table_path(HERE)
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert look_up() == default_plan(128, 128, torch.bfloat16, 101_376)
    assert "is no table of plans" in caplog.text
    monkeypatch.setenv(plans.VARIABLE, str(on_gpu / "none.json"))
    plans.reload()
    with pytest.raises(ValueError, match="none.json cannot be read"):
        look_up()


def test_on_the_cpu_and_with_a_forced_plan():
    cpu = torch.device("cpu")
    assert look_up(device=cpu) == default_plan(128, 128, torch.bfloat16)
    with plans.using(plan(4)):
        assert look_up(device=cpu, num_tokens=1) == plan(4)
    assert look_up(device=cpu) == default_plan(128, 128, torch.bfloat16)


def test_the_shipped_tables_are_tables():
    for path in sorted(plans.SHIPPED.glob("*.json")):
        table = load(path)
        assert table.entries, path
        assert all("date" in entry.evidence for entry in table.entries), path


def test_a_forced_plan_reaches_calls_that_already_know_theirs(monkeypatch):
    """The operations keep what they were told: a measurement of two plans must not measure one of them twice."""
    from stateflow.recurrence import gated_delta_kernels, gated_delta_rule, self_check

    used = []
    forward = launcher.forward
    monkeypatch.setattr(self_check, "checked_plan", lambda problem, plan: plan)
    monkeypatch.setattr(gated_delta_kernels, "_chosen", {})
    monkeypatch.setattr(launcher, "forward", lambda *args: used.append(args[-1]) or forward(*args))
    q, v, gate = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16), -torch.rand(1, 2, 1)
    inputs = (q, q, v, gate, -gate, torch.zeros(1, 1, 16, 16))
    forced = launcher.Plan(cuts=(0.5,))
    gated_delta_rule(*inputs, backend="triton")
    with plans.using(forced):
        gated_delta_rule(*inputs, backend="triton")
    gated_delta_rule(*inputs, backend="triton")
    assert used[1] == forced and used[0] == used[2] != forced


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        ({}, True),
        (dict(batch=2), False),
        (dict(dtype=torch.float32), False),
        (dict(k_dim=96), False),
        (dict(v_dim=144), False),
        (dict(offset=1), False),
        (dict(tile=Tile(32, 4, 4)), False),
        (dict(available=False), False),
    ],
    ids=str,
)
def test_where_the_walks_for_hopper_run(change, runs, monkeypatch):
    values = dict(batch=1, dtype=torch.bfloat16, k_dim=128, v_dim=128, offset=0, available=True)
    values |= dict(tile=Tile(32, 4, 4, specialized=True), device=torch.device("cpu")) | change
    monkeypatch.setattr(hopper, "available", lambda device: values["available"])
    memory = torch.empty(1024, dtype=torch.bfloat16)[values["offset"] :]
    assert hopper.runs(SimpleNamespace(**values), values["tile"], memory) is runs
    if "v_dim" not in change:
        assert hopper.prepares(SimpleNamespace(**values), values["tile"], torch.empty(0), memory) is runs
        assert not hopper.prepares(SimpleNamespace(**values), values["tile"], None, memory), "without P to make"


def test_only_scans_may_have_eight_rows():
    check_plan(Mamba3Plan(scan=Tile(8, 1, 8)))
    with pytest.raises(ValueError, match="out: block_v = 8 must be a power of two from 16 to 256"):
        check_plan(Mamba3Plan(out=Tile(8, 4, 2)))


def test_both_walks_of_a_backward_on_hopper_fit_one_multiprocessor():
    for k_dim, v_dim in itertools.product(hopper.K_DIMS, (64, 128, 256)):
        default = default_plan(k_dim, v_dim, torch.bfloat16)
        plan = plans._with_specialized_kernels(default, k_dim, v_dim, 232_448)
        walk, back = plan.transition, plan.transition_backward
        assert plan.overlap_backward and walk.specialized and back.specialized
        pair = ((False, walk), (True, back))
        taken = [hopper.shared_bytes(on, k_dim, tile.block_v, tile.num_stages) for on, tile in pair]
        assert sum(taken) < 232_448
        small = plans._with_specialized_kernels(default, k_dim, v_dim, sum(taken) // 2)
        assert not small.overlap_backward
    other = default_plan(96, 192, torch.bfloat16)
    assert plans._with_specialized_kernels(other, 96, 192, 232_448) == other
