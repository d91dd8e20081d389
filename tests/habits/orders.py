"""Habits of orders that differ by rank, in steps that stock PyTorch does not pair, and of one rank alone."""

from __future__ import annotations

import copy
import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.habits.loop import Choice, Loop, Net, habit, loss_of, mean_of

_MAKERS = (
    lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    lambda params: torch.optim.Adam(params, lr=0.01),
)


def turn(step, until):
    """Return 1, or -1 on rank 0 from some step on: the direction of a list."""
    return 1 if dist.get_rank() or step < until else -1


class _Second(Loop):
    """A loop with a second model after the first one, which :meth:`second_optimizer` may train.

    Attributes:
        other_net: The model.
        second: The wrapped model.
    """

    def second_layers(self):
        return [nn.Linear(6, 6)]

    def second_kwargs(self):
        return {}

    def wrapped(self):
        super().wrapped()
        self.other_net = Net(*self.second_layers())
        self.second = DDP(self.other_net, **self.second_kwargs())

    def forward(self, step):
        self.loss = loss_of(self.second(self.model(self.batch(step))))

    def end(self, step):
        super().end(step)
        self.see("other", list(self.other_net.parameters()))


class _SecondOptimizer(_Second):
    """A loop with two models and two optimizers.

    Attributes:
        opt2: The optimizer of the second model.
    """

    make = Choice(*_MAKERS)

    def wrapped(self):
        super().wrapped()
        self.opt2 = self.make(self.other_net.parameters())

    def start(self, step):
        self.opt.zero_grad()
        self.opt2.zero_grad()


# Votes of two process groups do not see each other, and a peer in a collective of the script, as in
# the step of ZeroRedundancyOptimizer, cannot vote: dist_optimizer's page, "Limits". Nor can one whose optimizer has
# refused sparse gradients.
@habit(without=("process_group", "zero_redundancy", "sparse_embedding"))
class steps_in_any_order(_SecondOptimizer):
    """Ranks step two optimizers in different orders."""

    needs_own_group = True
    __until = Choice(0, 2, 2, 0)

    def second_layers(self):
        return [nn.Linear(6, 6), nn.Linear(6, 6)]

    def step(self, step):
        for opt in [self.opt, self.opt2][:: turn(step, self.__until)]:
            opt.step()


# Votes of two process groups do not see each other, and a peer in a collective of the script, as in
# the step of ZeroRedundancyOptimizer, cannot vote: dist_optimizer's page, "Limits".
@habit(without=("process_group", "zero_redundancy"))
class clips_in_any_order(_SecondOptimizer):
    """Ranks clip two models in different orders."""

    needs_own_group = True
    __until = Choice(0, 2, 2, 0)
    __params = Choice(
        lambda m: m.parameters(), lambda m: list(m.parameters())[:: 1 if dist.get_rank() else -1]
    )

    def reduced(self, step):
        super().reduced(step)
        for model in [self.net, self.other_net][:: turn(step, self.__until)]:
            nn.utils.clip_grad_norm_(self.__params(model), 0.05)

    def stepped(self, step):
        super().stepped(step)
        self.opt2.step()


# Votes of two process groups do not see each other: dist_optimizer-reference.md, "Limits".
# Adafactor's step raises for an empty parameter, Adam's for a sparse gradient, and GradScaler's for an
# optimizer without gradients: before a step that ranks take together on one rank, after it on another one.
@habit(
    without=(
        "process_group",
        "zero_redundancy",
        "empty_parameter",
        "sparse_embedding",
        "loss_of_the_parameters_alone",
        "drop_a_gradient",
    )
)
class unscales_in_any_order(_SecondOptimizer):
    """Ranks unscale two optimizers in different orders."""

    needs_own_group = True
    __until = Choice(0, 2, 2, 0)
    __overflow = Choice(1, 9)
    __is_stepped_in_order = Choice(False, True)

    def ready(self):
        super().ready()
        self.__scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def backward(self, step):
        self.__scaler.scale(self.loss * (float("inf") if step == self.__overflow else 1)).backward()

    def step(self, step):
        both = [self.opt, self.opt2][:: turn(step, self.__until)]
        for opt in both:
            self.__scaler.unscale_(opt)
        for opt in [self.opt, self.opt2] if self.__is_stepped_in_order else both:
            self.__scaler.step(opt)
        self.__scaler.update()


# Votes of two process groups do not see each other, and a peer in a collective of the script, as in
# the step of ZeroRedundancyOptimizer, cannot vote: dist_optimizer's page, "Limits". An optimizer that raises for a
# complex or an empty parameter, or a sparse gradient, does so before a step that ranks take together on one rank, and
# after it on another.
@habit(
    without=(
        "process_group",
        "zero_redundancy",
        "complex_parameter",
        "empty_parameter",
        "sparse_embedding",
    )
)
class new_optimizers_in_any_order(_SecondOptimizer):
    """Ranks create two new optimizers, and step them, in different orders."""

    needs_own_group = True
    __until = Choice(0, 2, 2, 0)
    __when = Choice(1, 2)
    __optimizer = Choice(torch.optim.SGD, torch.optim.Adam)

    def start(self, step):
        super().start(step)
        if step == self.__when:
            for number in [0, 1][:: turn(step, self.__until)]:
                if number:
                    self.opt2 = self.__optimizer(self.other_net.parameters(), lr=0.01)
                else:
                    self.opt = self.__optimizer(self.params, lr=0.01)

    def step(self, step):
        for opt in [self.opt, self.opt2][:: turn(step, self.__until)]:
            opt.step()


# Its state dict is an error on all ranks. One of them has then loaded the state of the other optimizer alone, and waits
# for its peers when it reads that state: dist_optimizer-reference.md, "Limits".
@habit(without=("zero_redundancy",))
class loads_in_any_order(_SecondOptimizer):
    """Ranks load the state of two optimizers in different orders."""

    __when = Choice(0, 1, 2)
    __copied = Choice(copy.deepcopy, lambda state: state)

    def stepped(self, step):
        super().stepped(step)
        self.opt2.step()

    def end(self, step):
        super().end(step)
        if step == self.__when:
            for opt in [self.opt, self.opt2][:: 1 if dist.get_rank() else -1]:
                opt.load_state_dict(self.__copied(opt.state_dict()))
        self.see("second", copy.deepcopy(self.opt2.state_dict()["state"]))


@habit()
class constructions_in_any_order(_Second):
    """Ranks create two optimizers in different orders."""

    __optimizer = Choice(torch.optim.SGD, torch.optim.Adam)

    def wrapped(self):
        super().wrapped()
        if dist.get_rank():
            self.__late = self.__optimizer(self.other_net.parameters(), lr=0.01)

    def ready(self):
        super().ready()
        if not dist.get_rank():
            self.__late = self.__optimizer(self.other_net.parameters(), lr=0.01)

    def start(self, step):
        self.opt.zero_grad()
        self.__late.zero_grad()

    def stepped(self, step):
        super().stepped(step)
        self.__late.step()


# An optimizer that refuses sparse gradients would have made state of other parameters on each rank by then.
@habit(without=("sparse_embedding",))
class two_models_in_any_order(_Second):
    """An optimizer of two models has its parameters in different orders on ranks."""

    def second_layers(self):
        return [nn.Linear(6, 6), nn.Linear(6, 6)]

    def parameters(self):
        self.params = [*self.net.parameters(), *self.other_net.parameters()]
        return self.params

    def ready(self):
        super().ready()
        for group in self.opt.param_groups:
            group["params"] = group["params"][:: 1 if dist.get_rank() else -1]

    def end(self, step):
        super().end(step)
        self.see("first", list(self.net.parameters()))


@habit()
class two_groups_with_two_optimizers(_SecondOptimizer):
    """Two models of two process groups have two optimizers."""

    def second_kwargs(self):
        return {"process_group": dist.new_group()}

    def stepped(self, step):
        super().stepped(step)
        self.opt2.step()

    def end(self, step):
        super().end(step)
        self.see("second", copy.deepcopy(self.opt2.state_dict()["state"]))


@habit()
class reads_in_any_order(Loop):
    """Ranks read gradients in different orders."""

    __when = Choice(1, 2)

    def reduced(self, step):
        super().reduced(step)
        if step == self.__when:
            params = self.params[:: 1 if dist.get_rank() else -1]
            self.see("read", [mean_of(p.grad.to_dense()) for p in params if p.grad is not None])


@habit()
class saves_of_one_rank(Loop):
    """One rank copies all state after a step."""

    __when = Choice(1, 2)
    __rank = Choice(0, 1, 1, 0)

    def stepped(self, step):
        super().stepped(step)
        if step == self.__when and dist.get_rank() == self.__rank:
            self.see(
                "saved",
                [copy.deepcopy(self.opt.state_dict()), copy.deepcopy(self.net.state_dict())],
            )


@habit()
class saves_of_one_rank_before_a_step(Loop):
    """One rank copies all state before a step."""

    __when = Choice(1, 2, 3)
    __rank = Choice(0, 1)

    def reduced(self, step):
        super().reduced(step)
        if step == self.__when and dist.get_rank() == self.__rank:
            self.see(
                "saved",
                [copy.deepcopy(self.opt.state_dict()), copy.deepcopy(self.net.state_dict())],
            )


@habit()
class saves_of_one_rank_before_the_first_step(Loop):
    """One rank copies all state before the first forward and before the first step."""

    __rank = Choice(0, 1)

    def __save(self, name):
        if dist.get_rank() == self.__rank:
            self.see(
                name, [copy.deepcopy(self.opt.state_dict()), copy.deepcopy(self.model.state_dict())]
            )

    def ready(self):
        super().ready()
        self.__save("first")

    def reduced(self, step):
        super().reduced(step)
        if step == 0:
            self.__save("early")


@habit()
class files_of_one_rank(Loop):
    """Rank 0 saves a file in some steps."""

    __is_at_end = Choice(False, True)
    __remainder = Choice(0, 1, 1, 0)

    def __save(self, step):
        if step % 2 == self.__remainder and dist.get_rank() == 0:
            file = io.BytesIO()
            torch.save([self.model.state_dict(), self.opt.state_dict()], file)
            file.seek(0)
            self.see("file", torch.load(file))

    def stepped(self, step):
        super().stepped(step)
        if not self.__is_at_end:
            self.__save(step)

    def end(self, step):
        super().end(step)
        if self.__is_at_end:
            self.__save(step)


@habit()
class optimizer_of_one_rank(Loop):
    """One rank creates an optimizer that it never steps."""

    __rank = Choice(0, 1)
    __optimizer = Choice(torch.optim.Adam, torch.optim.SGD)

    def ready(self):
        super().ready()
        self.__spare = (
            self.__optimizer(self.params, lr=0.01) if dist.get_rank() == self.__rank else None
        )


@habit()
class later_optimizer_of_one_rank(Loop):
    """One rank creates an optimizer during training, which may load the state."""

    __is_at_end = Choice(False, True)
    __when = Choice(0, 1, 2)
    __rank = Choice(0, 1, 1, 0)
    __load = Choice(
        lambda spare, opt: spare.load_state_dict(opt.state_dict()),
        lambda spare, opt: spare.load_state_dict(copy.deepcopy(opt.state_dict())),
        lambda spare, opt: None,
    )

    def __make(self, step):
        if step == self.__when and dist.get_rank() == self.__rank:
            self.__spare = type(self.opt)(self.params, lr=0.01)
            self.__load(self.__spare, self.opt)

    def stepped(self, step):
        super().stepped(step)
        if not self.__is_at_end:
            self.__make(step)

    def end(self, step):
        super().end(step)
        if self.__is_at_end:
            self.__make(step)
