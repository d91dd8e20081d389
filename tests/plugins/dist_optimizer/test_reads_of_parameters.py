"""Parameters as user code reads and writes them after a step, while their gathers may still be in flight."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.plugins.ddp.arms import Record, data
from tests.plugins.dist_optimizer.checks import all_cases, check_all, ddp, on, params, train_step
from tests.plugins.dist_optimizer.test_loops import OPTIMIZERS, net
from tests.support.rarely import RARELY


class Follower:
    """An object that follows the parameters of a model, made before training."""

    def __init__(self, how: str, model: nn.Module, opt: torch.optim.Optimizer) -> None:
        self.how, self.model, self.opt = how, model, opt
        self.held = list(model.parameters())
        self.mean = copy.deepcopy(model.module)
        self.state = model.state_dict() if how == "state_dict held" else {}
        self.views = (
            [p.detach().view(-1) for p in model.parameters()] if how == "views held" else []
        )
        if how == "in memory of numpy":
            self.array = self.held[0].detach().numpy().copy()
            self.held[0].data = torch.from_numpy(self.array)
        self.averaged = torch.optim.swa_utils.AveragedModel(model.module) if how == "swa" else None

    def __call__(self, step: int) -> Any:
        """Run the script's code after ``optimizer.step()``; return the values that it read."""
        return getattr(self, self.how.replace(" ", "_"))(step)

    def ema_by_parameters(self, step: int) -> Any:
        with torch.no_grad():
            for mean, p in zip(self.mean.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        return params(self.mean)

    def ema_by_foreach(self, step: int) -> Any:
        with torch.no_grad():
            torch._foreach_lerp_(list(self.mean.parameters()), self.held, 0.1)
        return params(self.mean)

    def ema_by_state_dict(self, step: int) -> Any:
        for name, value in self.model.module.state_dict().items():
            self.mean.state_dict()[name].mul_(0.9).add_(value, alpha=0.1)
        return params(self.mean)

    def swa(self, step: int) -> Any:
        self.averaged.update_parameters(self.model.module)
        return params(self.averaged)

    def state_dict_held(self, step: int) -> Any:
        return {name: value.clone() for name, value in self.state.items()}

    def views_held(self, step: int) -> Any:
        return [view.clone() for view in self.views]

    def clamped(self, step: int) -> Any:
        with torch.no_grad():
            for p in self.model.parameters():
                p.clamp_(-0.3, 0.3)

    def clamped_by_data(self, step: int) -> Any:
        for p in self.model.parameters():
            p.data.clamp_(-0.3, 0.3)

    def reinitialised(self, step: int) -> Any:
        if step == 4:
            torch.manual_seed(5)
            nn.init.xavier_uniform_(self.held[0])

    def loaded(self, step: int) -> Any:
        if step == 4:
            self.model.module.load_state_dict(self.mean.state_dict())

    def new_data(self, step: int) -> Any:
        if step == 4:
            self.held[0].data = self.held[0].data * 0.5

    def clamped_on_rank_0_first(self, step: int) -> Any:
        if dist.get_rank() == 0:
            self.held[0].data.sum()
        self.clamped(step)

    def copied_model(self, step: int) -> Any:
        return params(copy.deepcopy(self.model.module))

    def copied_wrapper(self, step: int) -> Any:
        return params(copy.deepcopy(self.model)) if step in (3, 5) else None

    def copied_on_rank_0(self, step: int) -> Any:
        return params(copy.deepcopy(self.model.module)) if dist.get_rank() == 0 else None

    def saved_on_rank_0(self, step: int) -> Any:
        return self._saved(self.model.module.state_dict()) if dist.get_rank() == 0 else None

    def saved_module(self, step: int) -> Any:
        return params(self._saved(self.model.module, weights_only=False))

    def saved_with_the_optimizer(self, step: int) -> Any:
        return self._saved({"model": self.model.state_dict(), "opt": self.opt.state_dict()})

    def logged_by_numpy(self, step: int) -> Any:
        return [torch.from_numpy(p.detach().cpu().numpy().copy()) for p in self.held]

    def read_by_another_process(self, step: int) -> Any:
        return self._as_another_process_sees_it(self.held[0])

    def shared_with_another_process_later(self, step: int) -> Any:
        if step == 4:
            self.model.share_memory()
        return self._as_another_process_sees_it(self.held[2]) if step >= 4 else None

    def in_memory_of_numpy(self, step: int) -> Any:
        return torch.from_numpy(self.array.copy())

    def as_vector(self, step: int) -> Any:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()

    def evaluated_on_rank_0(self, step: int) -> Any:
        if dist.get_rank() == 0:
            with torch.no_grad():
                return self.model.module(data(77, 3, 6)), self.model(data(77, 3, 6))
        return None

    def evaluated_in_inference_mode(self, step: int) -> Any:
        with torch.inference_mode():
            return self.model.module(data(77, 3, 6)).clone()

    def read_by_a_thread(self, step: int) -> Any:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(params(self.model)))
        thread.start()
        thread.join()
        return found[0]

    def nothing(self, step: int) -> Any:
        return None

    @staticmethod
    def _as_another_process_sees_it(param: torch.Tensor) -> torch.Tensor:
        """Map shared memory again, as another process does."""
        # Another process reads without a call to this one, so this read must not wait for a pending parameter.
        with torch._C.DisableTorchFunctionSubclass():
            storage = torch.UntypedStorage._new_shared_fd_cpu(
                *param.untyped_storage()._share_fd_cpu_()
            )
            return torch.empty(0).set_(storage, 0, param.shape).clone()

    @staticmethod
    def _saved(value: Any, weights_only: bool = True) -> Any:
        file = io.BytesIO()
        torch.save(value, file)
        assert b"ovpatch" not in file.getvalue()
        file.seek(0)
        return torch.load(file, weights_only=weights_only)


HOWS = [name.replace("_", " ") for name in vars(Follower) if not name.startswith("_")]
HOWS = ["state_dict held" if how == "state dict held" else how for how in HOWS]
ON_CPU = ("read by another process", "shared with another process later", "in memory of numpy")


def train(how: str, optimizer: str = "adamw") -> list[Record]:
    module = net()
    model = ddp(module.share_memory() if how == "read by another process" else module)
    opt = OPTIMIZERS[optimizer](model.parameters())
    follow = Follower(how, model, opt)
    records = []
    for step in range(7):
        opt.zero_grad()
        loss = model(data(step, 5, 6)).square().mean()
        loss.backward()
        opt.step()
        records.append({"loss": loss.detach(), "found": follow(step)})
    records.append(params(model))
    return records


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=RARELY)])
def test_parameters_are_new_after_step_for_every_reader(ranks, world):
    check_all(ranks(world)(all_cases, train, on(world, {how: {"how": how} for how in HOWS})))


def watched(steps: int = 20) -> list[Record]:
    """Train while a thread saves all the time. It may read any step, but must read full tensors without an error."""
    model = ddp(net())
    opt = OPTIMIZERS["adamw"](model.parameters())
    shapes = {name: p.shape for name, p in model.named_parameters()}
    stop, wrong, saves = threading.Event(), [], []

    def save() -> None:
        try:
            while not stop.is_set():
                state = Follower._saved(model.state_dict())
                wrong.extend(name for name, p in state.items() if p.shape != shapes[name])
                saves.append(1)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            wrong.append(repr(error))

    thread = threading.Thread(target=save, daemon=True)
    thread.start()
    for step in range(steps):
        train_step(model, opt, step)
    stop.set()
    thread.join(60)
    assert not wrong, wrong[:5]
    assert saves
    return [params(model)]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_thread_saves_while_training_continues(ranks, overlap):
    check_all(ranks(2)(all_cases, watched, {"": {}}, options={"overlap_param_gather": overlap}))
