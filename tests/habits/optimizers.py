"""Habits of optimizers: their classes, groups and schedules, several of them, and steps that scripts leave out."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.habits.layers import Then, embed
from tests.habits.loop import Choice, Loop, call_in_thread, habit, loss_of


def _optimizer(
    name: str,
    doc: str,
    classes: str,
    kwargs: dict[str, Any],
    *variants: tuple[dict[str, Any], ...],
    without: Collection[str] = (),
) -> None:
    """Add a habit of an optimizer of one of some classes, with one of each of the variants of its arguments."""

    def optimizer(self, params):
        chosen = dict(kwargs)
        for i in range(len(variants)):
            # A scheduler writes into a learning rate that is a tensor, so each run has its own.
            chosen |= copy.deepcopy(getattr(self, f"_{name}__variant{i}"))
        return getattr(torch.optim, getattr(self, f"_{name}__class"))(params, **chosen)

    members = {f"_{name}__variant{i}": Choice(*values) for i, values in enumerate(variants)}
    members |= {f"_{name}__class": Choice(*classes.split()), "optimizer": optimizer}
    habit(without=without)(type(name, (Loop,), members | {"__doc__": doc, "__module__": __name__}))


_FOREACH = ({}, {"foreach": True}, {"foreach": False})

_optimizer(
    "momentum",
    "SGD with momentum.",
    "SGD",
    {"lr": 0.05, "momentum": 0.9},
    ({}, {"nesterov": True}, {"dampening": 0.1}),
    ({}, {"weight_decay": 0.1}, {"maximize": True}),
)
_optimizer(
    "adam",
    "Adam.",
    "Adam",
    {"lr": 0.01},
    ({}, {"amsgrad": True}, {"maximize": True}),
    ({}, {"weight_decay": 0.1}),
    _FOREACH,
)
_optimizer(
    "adamw",
    "AdamW.",
    "AdamW",
    {},
    ({"lr": 0.01}, {"lr": torch.tensor(0.01)}),
    ({}, {"amsgrad": True}),
    ({}, {"foreach": False}, {"betas": (0.0, 0.99)}),
)
_optimizer("fused", "A fused step.", "SGD Adam AdamW Adagrad", {"lr": 0.01, "fused": True})
_optimizer(
    "rmsprop",
    "RMSprop.",
    "RMSprop",
    {"lr": 0.01},
    ({}, {"momentum": 0.9}),
    ({}, {"centered": True}),
    ({}, {"foreach": True}),
    # Momentum adds up differences of rounding, which are the size of a step while the root is small.
    without=("bfloat16_layer",),
)
_optimizer(
    "adagrad",
    "Adagrad.",
    "Adagrad",
    {"lr": 0.05},
    ({}, {"lr_decay": 0.1}),
    ({}, {"initial_accumulator_value": 0.1}),
    ({}, {"foreach": True}),
)
_optimizer(
    "rare_optimizer",
    "An optimizer of torch that few scripts use.",
    "NAdam RAdam Adadelta Adamax ASGD Rprop",
    {"lr": 0.01},
    ({}, {"foreach": True}),
)
_optimizer("adafactor", "Adafactor, whose updates are not element-wise.", "Adafactor", {"lr": 0.05})


@habit()
class early_optimizer(Loop):
    """The optimizer is created before the model is wrapped."""

    is_optimizer_first = True


@habit()
class groups(Loop):
    """The optimizer has two groups."""

    def parameters(self):
        return [{"params": self.params[::2], "lr": 0.02}, {"params": self.params[1::2]}]


@habit()
class weight_decay_by_groups(Loop):
    """Matrices decay and vectors do not."""

    def parameters(self):
        matrices = [p for p in self.params if p.dim() > 1]
        vectors = [p for p in self.params if p.dim() <= 1]
        return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]


@habit()
class named_parameters(Loop):
    """The optimizer gets parameters with names."""

    def parameters(self):
        return list(self.net.named_parameters())


@habit()
class add_group(Loop):
    """A group is added after some steps."""

    def parameters(self):
        return self.params[1:] or self.params

    def stepped(self, step):
        super().stepped(step)
        if step == 1 and len(self.params) > 1:
            self.opt.add_param_group({"params": self.params[:1], "lr": 0.02})


@habit()
class replace_groups(Loop):
    """The list of groups is replaced by copies."""

    __when = Choice(1, 2)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            self.opt.param_groups = [dict(group, lr=0.02) for group in self.opt.param_groups]


@habit()
class remove_from_a_group(Loop):
    """A parameter leaves its group."""

    __when = Choice(1, 2)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            self.opt.param_groups[0]["params"] = self.opt.param_groups[0]["params"][1:]


@habit()
class two_optimizers(Loop):
    """Two optimizers train the same parameters."""

    __make = Choice(
        lambda params: torch.optim.SGD(params[::2], lr=0.01, momentum=0.9),
        lambda params: torch.optim.Adam(params[::2], lr=0.01),
        lambda params: torch.optim.AdamW(params, lr=0.01),
    )

    def ready(self):
        super().ready()
        self.__opt = self.__make(self.params)

    def stepped(self, step):
        super().stepped(step)
        self.__opt.step()

    def end(self, step):
        super().end(step)
        self.see("state", copy.deepcopy(self.__opt.state_dict()))


@habit()
class split_optimizers(Loop):
    """Each of two optimizers trains a part of the parameters."""

    def ready(self):
        super().ready()
        self.opt = torch.optim.SGD(self.params[::2], lr=0.1)
        self.__opt = torch.optim.Adam(self.params[1::2] or self.params, lr=0.01)

    def stepped(self, step):
        super().stepped(step)
        self.__opt.step()
        self.__opt.zero_grad()


@habit()
class change_lr(Loop):
    """The script sets the learning rate itself."""

    def stepped(self, step):
        super().stepped(step)
        self.opt.param_groups[0]["lr"] = 0.1 / (step + 2)


@habit()
class tensor_lr_by_hand(Loop):
    """The learning rate is a tensor in some steps."""

    def end(self, step):
        super().end(step)
        for group in self.opt.param_groups:
            group["lr"] = torch.tensor(0.01) if step % 2 else 0.01


@habit()
class scheduler(Loop):
    """A scheduler sets the learning rate."""

    __make = Choice(
        lambda opt: lr_scheduler.StepLR(opt, 2, 0.5),
        lambda opt: lr_scheduler.CosineAnnealingLR(opt, 4),
        lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
        lambda opt: lr_scheduler.OneCycleLR(opt, 0.05, total_steps=20),
    )
    __is_at_end = Choice(False, True)

    def ready(self):
        super().ready()
        self.__plan = self.__make(self.opt)

    def stepped(self, step):
        super().stepped(step)
        if not self.__is_at_end:
            self.__plan.step()

    def end(self, step):
        super().end(step)
        if self.__is_at_end:
            self.__plan.step()

    def last(self):
        super().last()
        self.see("lr", [group["lr"] for group in self.opt.param_groups])


@habit()
class step_hooks(Loop):
    """Hooks of the optimizer see gradients before and parameters after the step."""

    def ready(self):
        super().ready()

        def params_of(opt):
            return [p for group in opt.param_groups for p in group["params"]]

        self.opt.register_step_pre_hook(
            lambda opt, *_: self.see("before", [p.grad is None for p in params_of(opt)])
        )
        self.opt.register_step_post_hook(
            lambda opt, *_: self.see("after", [p.detach().clone() for p in params_of(opt)])
        )


@habit()
class closure(Loop):
    """The step calls a closure, which computes the gradients."""

    def forward(self, step):
        # Other habits may add to a loss.
        self.loss = torch.zeros((), requires_grad=True)

    def backward(self, step):
        pass

    def step(self, step):
        def compute():
            self.opt.zero_grad()
            loss = loss_of(self.model(self.batch(step)))
            loss.backward()
            return loss

        self.loss = self.opt.step(compute)

    def stepped(self, step):
        super().stepped(step)
        self.see("loss", self.loss)


@habit()
class lbfgs(closure):
    """LBFGS calls its closure several times in a step."""

    def optimizer(self, params):
        return torch.optim.LBFGS(params, lr=0.1, max_iter=2)


@habit()
class skip_steps(Loop):
    """Some steps are left out."""

    __should_step = Choice(lambda step: step % 2, lambda step: step != 1, lambda step: step > 1)

    def step(self, step):
        if self.__should_step(step):
            self.opt.step()


@habit()
class step_twice(Loop):
    """The optimizer steps twice with the same gradients."""

    __is_always = Choice(True, False)

    def step(self, step):
        self.opt.step()
        if self.__is_always or step == 2:
            self.opt.step()


@habit()
class step_at_first(Loop):
    """The optimizer steps before there is a gradient."""

    def ready(self):
        super().ready()
        self.opt.step()


@habit()
class no_gradients_in_a_step(Loop):
    """The optimizer steps after its gradients were dropped."""

    __when = Choice(1, 2)

    def start(self, step):
        super().start(step)
        if step == self.__when:
            self.opt.step()


@habit()
class new_optimizer(Loop):
    """Another optimizer trains the parameters after some steps."""

    __when = Choice(1, 2)
    __optimizer = Choice(torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            self.opt = self.__optimizer(self.params, lr=0.01)


@habit()
class sparse_adam(Loop):
    """SparseAdam trains an embedding, and another optimizer the other parameters."""

    def layers(self):
        return [*super().layers(), nn.Linear(6, 6), Then(nn.Embedding(9, 6, sparse=True), embed)]

    def parameters(self):
        every = self.params
        self.params = [p for p in every if p.shape != (9, 6)]
        self.__opt = torch.optim.SparseAdam([p for p in every if p.shape == (9, 6)], lr=0.05)
        return self.params

    def stepped(self, step):
        super().stepped(step)
        self.__opt.step()
        self.__opt.zero_grad()


@habit()
class zero_redundancy(Loop):
    """torch's own optimizer that shards state."""

    __optimizer = Choice(torch.optim.SGD, torch.optim.Adam)

    def optimizer(self, params):
        # The first instance of an optimizer's class wraps its step. Tests see that as a patch that stays, unless the
        # class is imported after they have looked.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(params, self.__optimizer, lr=0.01)


class _Halving:
    """A step that halves gradients before it calls that of torch."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad * 0.5
        return super().step(closure)


class OwnSGD(_Halving, torch.optim.SGD):
    """SGD with a step of a script."""


class OwnAdamW(_Halving, torch.optim.AdamW):
    """AdamW with a step of a script."""


@habit()
class own_optimizer(Loop):
    """The optimizer is a subclass with its own step."""

    __optimizer = Choice(OwnSGD, OwnAdamW)

    def optimizer(self, params):
        return self.__optimizer(params, lr=0.01)


class Lamb(torch.optim.Optimizer):
    """An optimizer whose updates depend on norms of parameters."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.lerp_(p.grad.to_dense(), 0.1)
                p.sub_(m * (group["lr"] * (p.norm() + 0.1) / (m.norm() + 0.1)))
        return loss


@habit()
class lamb(Loop):
    """The optimizer's updates depend on norms, and the user names its class or does not."""

    switches = True
    __named = Choice(f"{__name__}.Lamb", "")

    def options(self):
        options = super().options()
        options["dist_optimizer"]["per_parameter"] = self.__named
        return options

    def optimizer(self, params):
        return Lamb(params, lr=0.01)


@habit()
class update_by_hand(Loop):
    """The script updates parameters itself."""

    __update = Choice(
        lambda p: p.sub_(0.1 * p.grad),
        lambda p: p.add_(p.grad, alpha=-0.1),
        lambda p: p.copy_(p - 0.1 * p.grad),
    )

    def step(self, step):
        with torch.no_grad():
            for p in self.params:
                if p.grad is not None:
                    self.__update(p)


@habit()
class update_by_foreach(Loop):
    """The script updates all parameters by one call."""

    def step(self, step):
        with torch.no_grad():
            given = self.dense()
            torch._foreach_add_(given, [p.grad for p in given], alpha=-0.1)


@habit()
class main_parameters_by_hand(Loop):
    """The optimizer trains copies in double precision, which the script copies back."""

    def parameters(self):
        self.__every = list(self.net.parameters())
        self.params = [
            (p.detach().double() if p.is_floating_point() else p.detach().clone()).requires_grad_()
            for p in self.__every
        ]
        return self.params

    def start(self, step):
        for p in self.__every:
            p.grad = None

    def reduced(self, step):
        super().reduced(step)
        for m, p in zip(self.params, self.__every, strict=True):
            m.grad = None if p.grad is None else p.grad.to_dense().to(m.dtype)

    def stepped(self, step):
        super().stepped(step)
        with torch.no_grad():
            for m, p in zip(self.params, self.__every, strict=True):
                p.copy_(m)


# The stock reducer needs the sparse gradients that these hooks drop: ddp-reference.md.
@habit(without=("sparse_embedding", "sparse_adam"))
class step_in_hooks(Loop):
    """Each parameter has its own optimizer, which steps as soon as the gradient is there."""

    def ready(self):
        super().ready()
        self.__opts = {
            p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in self.params if p.requires_grad
        }
        for param in self.__opts:
            param.register_post_accumulate_grad_hook(self.__step)

    def __step(self, param):
        self.__opts[param].step()
        self.__opts[param].zero_grad()

    def step(self, step):
        pass


@habit()
class slow_weights(Loop):
    """Weights follow their own averages in some steps, as with Lookahead."""

    def ready(self):
        super().ready()
        self.__slow = [p.detach().clone() for p in self.params]

    def stepped(self, step):
        super().stepped(step)
        if step % 2:
            for p, slow in zip(self.params, self.__slow, strict=True):
                slow.lerp_(p.data, 0.5)
                p.data.copy_(slow)


# p + a - a rounds differently if gradients are local, and a shard has the rounding of one rank.
@habit(
    without=(
        "all_local",
        "accumulate_at_times",
        "forward_under_no_sync",
        "twice_backward",
        "two_forwards_and_backwards",
    )
)
class sharpness(Loop):
    """The gradients of a step are those at a point uphill, as with SAM."""

    __kwargs = Choice({}, {"set_to_none": False})

    def reduced(self, step):
        super().reduced(step)
        ascent = [
            None if p.grad is None or p.grad.is_sparse else 0.05 * p.grad for p in self.params
        ]
        with torch.no_grad():
            for p, a in zip(self.params, ascent, strict=True):
                if a is not None:
                    p.add_(a)
        self.opt.zero_grad(**self.__kwargs)
        loss_of(self.model(self.batch(step))).backward()
        with torch.no_grad():
            for p, a in zip(self.params, ascent, strict=True):
                if a is not None:
                    p.sub_(a)


@habit()
class step_in_a_thread(Loop):
    """The step runs in another thread."""

    def step(self, step):
        call_in_thread(self.opt.step)
