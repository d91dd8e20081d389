"""Habits of hands on parameters: scripts write, average, exchange, freeze, tie and replace them."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune as pruning
from torch.optim import swa_utils

from tests.habits.loop import Choice, Loop, habit, loss_of
from tests.habits.wrapping import UNFINISHED, find_unused

#: Habits whose later iterations may not use fewer parameters.
_STATIC = ("static_graph", "static_graph_later", "twice_backward")


def _plain_linears(net):
    # tp_linear gives linears a class of the same name.
    return [m for m in net.layers if isinstance(m, nn.Linear) and type(m).__name__ == "Linear"]


@habit()
class decay_by_hand(Loop):
    """The script decays parameters, and zeroes gradients after that."""

    __place = Choice("start", "stepped", "end")
    __kwargs = Choice({}, {"set_to_none": False})

    def __decay(self, place):
        if place == self.__place:
            with torch.no_grad():
                for p in self.params:
                    p.mul_(0.99)
            self.opt.zero_grad(**self.__kwargs)

    def start(self, step):
        super().start(step)
        self.__decay("start")

    def stepped(self, step):
        super().stepped(step)
        self.__decay("stepped")

    def end(self, step):
        super().end(step)
        self.__decay("end")


def _replace_data(p):
    p.data = p.data * 0.9


def _fill_data(p):
    p.data[...] = 0.1


@habit()
class write_data(Loop):
    """The script writes ``data`` of a parameter."""

    __write = Choice(_replace_data, lambda p: p.data.copy_(p.data * 0.9), _fill_data)
    __index = Choice(0, -1)

    def stepped(self, step):
        super().stepped(step)
        self.__write(self.params[self.__index])


@habit()
class clamp(Loop):
    """The script changes ``data`` of a parameter in place, in some steps."""

    __write = Choice(lambda data: data.mul_(0.9), lambda data: data.sub_(0.01))

    def stepped(self, step):
        super().stepped(step)
        if step % 2:
            self.__write(self.params[0].data)


@habit()
class ema(Loop):
    """A copy of the model follows its average."""

    def ready(self):
        super().ready()
        self.__ema = copy.deepcopy(self.net)

    def stepped(self, step):
        super().stepped(step)
        with torch.no_grad():
            for mean, p in zip(self.__ema.parameters(), self.net.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        self.see("ema", list(self.__ema.parameters()))


@habit()
class averaged_model(Loop):
    """``AveragedModel`` follows the model."""

    def ready(self):
        super().ready()
        self.__averaged = swa_utils.AveragedModel(self.net)

    def stepped(self, step):
        super().stepped(step)
        self.__averaged.update_parameters(self.net)

    def last(self):
        super().last()
        self.see("averaged", list(self.__averaged.parameters()))


@habit()
class evaluate_by_averages(Loop):
    """Parameters and their averages swap ``data`` for an evaluation."""

    def ready(self):
        super().ready()
        self.__ema = [p.detach().clone() for p in self.params]

    def __swap(self):
        for p, mean in zip(self.params, self.__ema, strict=True):
            p.data, mean.data = mean.data, p.data

    def end(self, step):
        super().end(step)
        for p, mean in zip(self.params, self.__ema, strict=True):
            mean.lerp_(p.detach(), 0.1)
        self.__swap()
        with torch.no_grad():
            self.see("eval", self.model(self.batch(step, 5)))
        self.__swap()


@habit()
class vector(Loop):
    """Parameters become a vector and are set from a vector."""

    def stepped(self, step):
        super().stepped(step)
        # One vector of several dtypes would change the dtype of parameters. In stock PyTorch, a
        # wrapped model then loses gradients, and a later forward raises.
        for dtype in dict.fromkeys(p.dtype for p in self.params):
            params = [p for p in self.params if p.dtype == dtype]
            flat = nn.utils.parameters_to_vector(params)
            if step == 2:
                nn.utils.vector_to_parameters(flat * 0.9, params)
            self.see("vector", flat)


@habit()
class broadcast_parameters(Loop):
    """The script broadcasts parameters after each step."""

    def stepped(self, step):
        super().stepped(step)
        for p in self.params:
            dist.broadcast(p.data, 0)


@habit()
class all_reduce_parameters(Loop):
    """The script averages parameters after each step."""

    def stepped(self, step):
        super().stepped(step)
        with torch.no_grad():
            for p in self.params:
                dist.all_reduce(p)
                p.div_(dist.get_world_size())


@habit()
class gather_parameters(Loop):
    """The script gathers a parameter of all ranks."""

    def stepped(self, step):
        super().stepped(step)
        own = self.params[0].detach().contiguous()
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own)
        self.see("gathered", found)


@habit()
class initialise_again(Loop):
    """A parameter is initialized again."""

    def stepped(self, step):
        super().stepped(step)
        if step == 1:
            torch.manual_seed(3)
            nn.init.uniform_(self.params[0], -0.1, 0.1)


@habit()
class reset_layers(Loop):
    """All layers are reset."""

    __when = Choice(1, 2)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            torch.manual_seed(5)
            self.net.apply(
                lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None
            )


# Parameters that differ by rank: dist_optimizer-reference.md, "Limits".
@habit(without=("ignored", "outside"))
class copy_between_parameters(Loop):
    """The script copies a parameter to another one."""

    def stepped(self, step):
        super().stepped(step)
        same = [p for p in self.params if p.shape == self.params[0].shape]
        with torch.no_grad():
            same[-1].copy_(same[0])


# The stock reducer needs the sparse gradient of a frozen embedding; the reducer of ovpatch does not. After a forward
# without a backward, it takes the next local backward for the missing one, and raises if that trains a parameter that
# was frozen in the forward.
@habit(
    without=(
        "sparse_embedding",
        "sparse_adam",
        "forward_without_backward",
        "two_models_apart",
        *_STATIC,
    )
)
class freeze_for_a_while(find_unused):
    """A parameter is frozen for two steps."""

    __index = Choice(0, -1)

    def start(self, step):
        self.params[self.__index].requires_grad_(step not in (1, 2))
        super().start(step)


@habit(without=(*UNFINISHED, *_STATIC))
class freeze_later(Loop):
    """A parameter is frozen after some steps, and the wrapper does not search for it."""

    def start(self, step):
        if step == 2:
            self.params[0].requires_grad_(False)
        super().start(step)


# The stock reducer with skip_all_reduce_unused_params scales the kept gradient of a bucket down in each step, and adds
# no other one to it, if the gradient is a view of the bucket or sparse. Here it stays as it is.
@habit(
    without=(
        *_STATIC,
        "save_and_restore_gradients",
        "two_models_apart",
        "alternate",
        "forward_without_backward",
        "skip_unused",
    )
)
class freeze_with_its_gradient(find_unused):
    """A frozen parameter keeps its gradient."""

    __when = Choice(1, 2)

    def start(self, step):
        if step == self.__when:
            self.params[0].requires_grad_(False)
        if step == 0:
            self.opt.zero_grad()


@habit()
class tied(Loop):
    """Two layers have one weight."""

    def layers(self):
        return [*super().layers(), nn.Linear(6, 6), nn.Linear(6, 6)]

    def made(self):
        super().made()
        linears = _plain_linears(self.net)
        linears[-1].weight = linears[0].weight


@habit()
class swap_tensors(Loop):
    """``swap_tensors`` exchanges a parameter."""

    def stepped(self, step):
        super().stepped(step)
        if step == 1:
            torch.utils.swap_tensors(self.params[0], nn.Parameter(self.params[0].detach() * 0.9))


# Both reducers wait for the gradient of the parameter that was replaced.
@habit(without=UNFINISHED)
class replace_a_parameter(Loop):
    """A layer gets another parameter after the wrap."""

    def stepped(self, step):
        super().stepped(step)
        linears = _plain_linears(self.net)
        if step == 2 and linears:
            linears[0].weight = nn.Parameter(linears[0].weight.detach() * 0.9)


@habit()
class cast_the_model(Loop):
    """The model is cast before the wrap."""

    __dtype = Choice(torch.double, torch.float)

    def made(self):
        super().made()
        self.net.to(self.__dtype)

    def forward(self, step):
        self.loss = loss_of(self.model(self.batch(step).to(next(self.net.parameters()).dtype)))


@habit()
class share_memory(Loop):
    """Parameters are in shared memory."""

    def made(self):
        super().made()
        self.net.share_memory()


@habit()
class flat_parameters(Loop):
    """Parameters are views of one tensor of the script."""

    def made(self):
        super().made()
        trained = [
            p for p in self.net.parameters() if p.dtype == torch.float32 and p.is_contiguous()
        ]
        self.__flat = torch.cat([p.detach().reshape(-1) for p in trained]) if trained else None
        place = 0
        for p in trained:
            p.data = self.__flat[place : place + p.numel()].view_as(p)
            place += p.numel()

    def end(self, step):
        super().end(step)
        self.see("flat", self.__flat)


@habit()
class prune(Loop):
    """Weights are pruned before the wrap."""

    def made(self):
        super().made()
        for m in self.net.modules():
            if type(m) is not nn.Linear or m._forward_pre_hooks:
                continue
            if m.weight.requires_grad and m.weight.dtype == torch.float32:
                pruning.l1_unstructured(m, "weight", 0.3)
