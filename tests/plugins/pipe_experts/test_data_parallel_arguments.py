"""Parameters that ``expert_data_parallel`` does not touch, and arguments that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ovpatch.overlap.comm.consensus import RankMismatchError
from ovpatch_plugins.pipe_experts import expert_data_parallel
from tests.plugins.pipe_experts.test_data_parallel import Model, _group


class Stacked(nn.Module):
    """A model that owns expert weights, one of them under two names, and a buffer and a module that DDP ignores."""

    def __init__(self) -> None:
        super().__init__()
        rank = float(dist.get_rank())
        self.stacked = nn.Parameter(torch.full((2, 3, 3), rank))
        self.frozen = nn.Parameter(torch.full((2,), rank), requires_grad=False)
        self.expert = nn.Linear(3, 3)
        self.expert.weight.data.fill_(rank)
        self.expert.register_buffer("seen", torch.full((1,), rank))
        self.tied = self.expert.weight
        self.dense, self.ignored = nn.Linear(3, 3), nn.Linear(3, 3)
        self.ignored.weight.data.fill_(rank)
        self._ddp_params_and_buffers_to_ignore = ["ignored.weight"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ignored(self.dense(self.expert(x @ self.stacked[0])))


def ignored() -> dict[str, Any]:
    model = Stacked()
    ddp = expert_data_parallel(model, iter([model.stacked, model.frozen, model.expert]), None)
    ddp(torch.full((2, 3), 1.0 + dist.get_rank())).sum().backward()
    values = {
        name: value.detach().flatten()[0].item() for name, value in model.state_dict().items()
    }
    assert model.stacked.grad is not None
    assert model.expert.weight.grad is not None
    mine = [model.stacked.grad.flatten()[0].item(), model.expert.weight.grad.flatten()[0].item()]
    return {**values, "grads": mine}


def test_state_of_the_experts_is_not_touched_under_any_name(ranks):
    results = ranks(2)(ignored)
    assert results[0]["grads"] != results[1]["grads"]
    for rank, values in enumerate(results):
        for name in ("stacked", "frozen", "expert.weight", "expert.seen", "tied", "ignored.weight"):
            assert values[name] == rank, name


def refused(what: str) -> str:
    model = Model(2)
    experts: list[Any] = list(model.experts)
    group = _group([0]) if what == "group" else dist.new_group([0, 1])
    if what == "group" and group is None:
        group = dist.GroupMember.NON_GROUP_MEMBER
    if what == "stranger":
        experts.append(nn.Parameter(torch.zeros(4, 2)))
    if what == "device":
        model.experts[1].to("meta")
    if what == "other experts" and dist.get_rank() == 1:
        model.experts[1] = experts[1] = nn.Linear(5, 5)
    try:
        if what != "group" or dist.get_rank() == 1:
            expert_data_parallel(model, experts, group)
    except (ValueError, RankMismatchError) as error:
        return str(error)
    return "no error"


TEXTS = {
    "stranger": ("(4, 2), is no parameter of Model", "as they are in it now."),
    "device": ("'experts.1.0.weight' is on meta", "before expert_data_parallel()."),
    "other experts": ("experts.1.0.weight (10, 8) torch.float32", "and ranks 2 and 3 as well."),
    "group": ("rank 1 is not in the group", "and ranks 2 and 3 as well."),
}


@pytest.mark.parametrize("what", TEXTS)
def test_errors_end_with_the_remedy(ranks, what):
    for rank, text in enumerate(ranks(2)(refused, what)):
        wanted, end = TEXTS[what]
        assert (wanted in text and text.endswith(end)) or (what == "group" and rank == 0), text
