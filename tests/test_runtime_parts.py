"""The pieces of the runtime on their own: values, micro-batches, partition, ties, saved bytes."""

from __future__ import annotations

import itertools
from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from timelyfreeze import FreezingPipeline, NoChunk
from timelyfreeze.runtime import register_splitter
from timelyfreeze.runtime.memory import count_saved_bytes
from timelyfreeze.runtime.microbatch import split_batch
from timelyfreeze.runtime.partition import balanced_split_points, measure_children_s
from timelyfreeze.runtime.ties import TiedParameters, UnsharedStages
from timelyfreeze.runtime.values import encode, map_tensors, stage_entry

Point = namedtuple("Point", ["x", "y"])  # without annotations


class Output(OrderedDict):
    """A dict with attributes, as model libraries return."""


def test_values_come_back_with_their_types():
    output = Output(h=torch.ones(2), skip=None)
    output.note = "kept"
    value = (Point(torch.zeros(1), 3), [torch.ones(1), {"k": (torch.ones(2),)}], output, "text", None)
    tensors, spec = encode(value)
    back = spec.decode([t + 1 for t in tensors])
    assert len(tensors) == 4
    assert type(back[0]) is Point
    assert back[0].x.item() == 1
    assert back[1][1]["k"][0].tolist() == [2, 2]
    assert type(back[2]) is Output
    assert back[2].note == "kept"
    assert back[2]["h"].tolist() == [2, 2]
    assert value[2]["h"].tolist() == [1, 1]  # the original is not touched
    assert back[3:] == ("text", None)


@pytest.mark.parametrize(
    ("signature", "value", "expected"),
    [
        (lambda self, x: x, (1, 2), (1, 2)),  # one argument: as nn.Sequential does
        (lambda self, a, b: (b, a), (1, 2), (2, 1)),
        (lambda self, a, b=0: (a, b), (1, 2), ((1, 2), 0)),  # the second may be left out
        (lambda self, *xs: xs, (1, 2), (1, 2)),
        (lambda self, a, b: (b, a), {"a": 1, "b": 2}, (2, 1)),
        (lambda self, a, b=0: a, {"a": 1, "b": 2}, {"a": 1, "b": 2}),
    ],
)
def test_how_a_stage_is_entered(signature, value, expected):
    module = type("Probe", (nn.Module,), {"forward": signature})()
    assert stage_entry(module, takes_target=False)(value) == expected


def test_a_last_stage_with_a_target_gets_it_last():
    pair = type("Pair", (nn.Module,), {"forward": lambda self, a, b, target: (a, b, target)})()
    enter = stage_entry(pair, takes_target=True)
    assert enter((1, 2), 3) == (1, 2, 3)
    assert enter({"b": 2, "a": 1}, 3) == (1, 2, 3)


@given(st.integers(1, 40), st.integers(1, 12))
def test_slices_cover_the_batch_and_differ_by_one_at_most(num_samples, num_microbatches):
    x = torch.arange(num_samples)
    slices = split_batch((x, {"again": x, "flag": True}), {"whole": NoChunk(x)}, x, num_microbatches)
    sizes = [one.num_samples for one in slices]
    assert len(sizes) == min(num_samples, num_microbatches)
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([one.args[0] for one in slices]), x)
    assert torch.equal(torch.cat([one.args[1]["again"] for one in slices]), x)
    assert torch.equal(torch.cat([one.target for one in slices]), x)
    assert all(one.kwargs["whole"] is x and one.args[1]["flag"] is True for one in slices)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_the_balanced_partition_is_the_best_one(times_s, data):
    num_stages = data.draw(st.integers(1, len(times_s)))

    def longest(points):
        return max(sum(times_s[a:b]) for a, b in itertools.pairwise([0, *points, len(times_s)]))

    every = itertools.combinations(range(1, len(times_s)), num_stages - 1)
    assert longest(balanced_split_points(times_s, num_stages)) == min(longest(points) for points in every)


@pytest.mark.parametrize("stage_to_rank", [[0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]])
@pytest.mark.parametrize("seed", range(10))
def test_ranks_are_balanced_where_they_hold_several_stages(stage_to_rank, seed):
    times_s = torch.rand(10, generator=torch.Generator().manual_seed(seed)).tolist()

    def busiest(points):
        ranks_s = [0.0, 0.0]
        for rank, (a, b) in zip(stage_to_rank, itertools.pairwise([0, *points, len(times_s)]), strict=True):
            ranks_s[rank] += sum(times_s[a:b])
        return max(ranks_s)

    every = list(itertools.combinations(range(1, len(times_s)), 3))
    found = busiest(balanced_split_points(times_s, 4, stage_to_rank))
    assert found <= 1.1 * min(map(busiest, every))
    assert found <= busiest(balanced_split_points(times_s, 4))


def test_measuring_children_leaves_the_model_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(8, 4)
    state = torch.get_rng_state()
    times_s = measure_children_s(list(model), (x,), {}, torch.device("cpu"))
    assert len(times_s) == 4
    assert all(time_s > 0 for time_s in times_s)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_registered_splitter_is_used():
    class Twin(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    register_splitter(Twin, lambda model: [model.first, model.second])
    model = Twin()
    with FreezingPipeline(model, 2, 2, loss_fn=nn.functional.mse_loss) as pipe:
        pipe.step(torch.ones(4, 3), target=torch.ones(4, 3))
        assert list(pipe.state_dict()) == ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert model.second.weight.grad is not None


def test_aliases_share_storage_and_only_while_installed():
    embed = nn.Embedding(5, 3)
    head = nn.Linear(3, 5, bias=False)
    head.weight = embed.weight
    unshared = UnsharedStages([embed, nn.Sequential(embed, head)])
    stages = unshared.stages
    unshared.restore()
    assert stages[1][0] is embed
    embed.eval()
    unshared.install()
    assert not stages[1][0].training
    assert stages[0] is embed
    assert stages[1][0] is not embed
    assert stages[1][0].weight is embed.weight
    ties = TiedParameters(stages, [torch.device("cpu")] * 2)
    (alias,) = ties.stage_parameters[1]
    with ties.installed():
        assert head.weight is alias
        assert stages[1][0].weight is alias
        assert embed.weight is not alias
        assert alias.data_ptr() == embed.weight.data_ptr()
    assert head.weight is embed.weight
    alias.grad = torch.ones(5, 3)
    embed.weight.grad = torch.ones(5, 3)
    ties.merge_gradients()
    assert embed.weight.grad.unique().tolist() == [2.0]
    assert alias.grad is None
    embed.weight.data = torch.zeros(5, 3)  # as .to() and load_state_dict(assign=True) do
    with ties.installed():
        assert head.weight.data_ptr() == embed.weight.data_ptr()


def test_saved_bytes_count_storages_once_and_not_parameters():
    layer = nn.Linear(4, 4)
    x = torch.randn(8, 4, requires_grad=True)
    with count_saved_bytes(layer.parameters()) as saved:
        y = layer(x)  # keeps x: 128 bytes
        z = (y * y).sum()  # keeps y twice, one storage: 128 bytes
        assert saved.live_bytes == saved.peak_bytes == 256
        z.backward()
    assert saved.live_bytes == 0
    assert saved.total_bytes == 256


def test_saved_bytes_are_seen_on_the_stages_threads():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(8, 4)
    with FreezingPipeline(model, 2, 4, loss_fn=nn.functional.mse_loss, schedule="gpipe") as pipe:
        pipe.step(x, target=x)
        with count_saved_bytes(pipe.parameters()) as saved:
            pipe.step(x, target=x)
    # Of every sample: the input, two tanh outputs, the error; x and target share storages between micro-batches.
    assert saved.peak_bytes >= 4 * 8 * 4 * 3
    assert saved.live_bytes == 0


def test_map_tensors_keeps_what_it_does_not_know():
    marker = object()
    assert map_tensors((marker, torch.ones(1)), lambda t: t.item()) == (marker, 1.0)
