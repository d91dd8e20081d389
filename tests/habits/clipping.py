"""Habits of clipping, and of norms of gradients."""

from __future__ import annotations

import torch
from torch import nn

from tests.habits.loop import Choice, Loop, habit


@habit()
class clip_norm(Loop):
    """``clip_grad_norm_`` between the backward and the step; the norm is logged."""

    __params = Choice(
        lambda loop: loop.params,
        lambda loop: loop.model.parameters(),
        lambda loop: loop.params[::2],
    )
    __max_norm = Choice(0.05, 100.0)
    __kwargs = Choice(
        {}, {"foreach": True}, {"foreach": False}, {"norm_type": 1.0}, {"norm_type": float("inf")}
    )

    def reduced(self, step):
        super().reduced(step)
        norm = nn.utils.clip_grad_norm_(self.__params(self), self.__max_norm, **self.__kwargs)
        self.see("norm", torch.log1p(norm))


@habit()
class clip_one_by_one(Loop):
    """``clip_grad_norm_`` is called for each parameter."""

    def reduced(self, step):
        super().reduced(step)
        for p in self.params:
            nn.utils.clip_grad_norm_(p, 0.05)


@habit()
class total_norm(Loop):
    """``get_total_norm`` of all gradients is logged."""

    def reduced(self, step):
        super().reduced(step)
        norm = nn.utils.get_total_norm([p.grad for p in self.params if p.grad is not None])
        self.see("norm", torch.log1p(norm))


@habit()
class clip_value(Loop):
    """``clip_grad_value_`` between the backward and the step."""

    __kwargs = Choice({}, {"foreach": False})

    def reduced(self, step):
        super().reduced(step)
        nn.utils.clip_grad_value_(self.params, 0.01, **self.__kwargs)


@habit()
class norms_by_hand(Loop):
    """The script computes the norm of each gradient."""

    __norms = Choice(
        torch._foreach_norm,
        lambda grads: [grad.norm() for grad in grads],
        lambda grads: [grad.abs().max() if grad.numel() else 0 for grad in grads],
    )

    def reduced(self, step):
        super().reduced(step)
        self.see("norms", self.__norms([p.grad for p in self.dense()]))


@habit()
class clip_in_a_step_hook(Loop):
    """A hook of the optimizer clips gradients."""

    def ready(self):
        super().ready()
        self.opt.register_step_pre_hook(
            lambda opt, *_: nn.utils.clip_grad_value_(
                [p for g in opt.param_groups for p in g["params"]], 0.01
            )
        )


@habit()
class clip_in_hooks(Loop):
    """Hooks of the parameters clip gradients as soon as they are there."""

    def wrapped(self):
        super().wrapped()
        for p in self.trained():
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 0.1))
