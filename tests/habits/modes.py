"""Habits of modes: user modes, profilers, default dtypes, and states of autograd around a step."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.habits.loop import Choice, Loop, habit


@habit()
class random_numbers(Loop):
    """The script draws random numbers."""

    def end(self, step):
        super().end(step)
        self.see("random", torch.rand(2))


@habit()
class step_with_gradients_enabled(Loop):
    """The step runs with gradients enabled or disabled."""

    __mode = Choice(torch.enable_grad, torch.no_grad)

    def step(self, step):
        with self.__mode():
            self.opt.step()


# In stock PyTorch, state is then a tensor that no other code may write into.
@habit(without=("write_state",))
class step_in_inference_mode(Loop):
    """The step runs in inference mode."""

    def step(self, step):
        with torch.inference_mode():
            self.opt.step()


@habit()
class default_dtype(Loop):
    """The default dtype changes for a moment."""

    def end(self, step):
        super().end(step)
        torch.set_default_dtype(torch.float64)
        try:
            self.see("dtype", torch.ones(1) + self.params[0].detach().sum().double().item())
        finally:
            torch.set_default_dtype(torch.float32)


class _FunctionMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@habit()
class function_mode(Loop):
    """The step and reads of parameters run in a function mode."""

    def step(self, step):
        with _FunctionMode():
            self.opt.step()

    def stepped(self, step):
        super().stepped(step)
        with _FunctionMode():
            self.see("sum", [p.detach().sum() for p in self.params])


@habit()
class dispatch_mode(Loop):
    """Forward and backward run in a dispatch mode."""

    def forward(self, step):
        with _DispatchMode():
            super().forward(step)

    def backward(self, step):
        with _DispatchMode():
            self.loss.backward()


@habit()
class flop_counter(Loop):
    """Forward and backward are counted."""

    def forward(self, step):
        with FlopCounterMode(display=False) as flops:
            super().forward(step)
            self.loss.backward()
        self.see("flops", flops.get_total_flops())

    def backward(self, step):
        pass


@habit()
class profiler(Loop):
    """Forward and backward are profiled."""

    def forward(self, step):
        with torch.profiler.profile():
            super().forward(step)
            self.loss.backward()

    def backward(self, step):
        pass
