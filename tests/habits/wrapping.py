"""Habits of wrapping: arguments of ``DistributedDataParallel``, its hooks, several wrappers, several models."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.habits.layers import Then
from tests.habits.loop import Choice, Loop, Net, habit, loss_of

#: The habits that turn features off while a model is wrapped.
REVERTS = ("revert", "revert_early", "revert_and_apply", "revert_and_wrap_again")

#: The habits that a loop cannot have if a gradient is missing and not searched for: the reduction stays
#: unfinished, and the next forward raises. Until then all gradients are local, but stock PyTorch has
#: already divided those in views, and sparse ones, by the number of ranks (ddp-reference.md, "Options").
#: A communication hook, join() and revert() give the model a new stock reducer, which does not know
#: of the unfinished reduction and does not raise.
UNFINISHED = ("views", "sparse_embedding", "sparse_adam", "late_comm_hook", "join", *REVERTS)


def _argument(name: str, doc: str, argument: str, *values: Any) -> type[Loop]:
    """Add a habit that gives the wrapper an argument."""

    def kwargs(self):
        return super(cls, self).kwargs() | {argument: getattr(self, f"_{name}__value")}

    members = {
        "__doc__": doc,
        "kwargs": kwargs,
        f"_{name}__value": Choice(*values),
        "__module__": __name__,
    }
    cls = type(name, (Loop,), members)
    return habit()(cls)


_argument("tiny_buckets", "Many buckets.", "bucket_cap_mb", 1e-4, 2e-4, 1e-3)
_argument("one_bucket", "A single bucket.", "bucket_cap_mb", 100)
_argument("views", "Gradients are views of buckets.", "gradient_as_bucket_view", True)
_argument("static_graph", "All iterations are declared to be the same.", "static_graph", True)
find_unused = _argument(
    "find_unused", "The wrapper searches unused parameters.", "find_unused_parameters", True
)
_argument("own_buffers", "Each rank keeps its own buffers.", "broadcast_buffers", False)
_argument("no_first_sync", "Ranks do not exchange parameters at first.", "init_sync", False)
_argument(
    "skip_unused",
    "Parameters that no rank used are not reduced.",
    "skip_all_reduce_unused_params",
    True,
)


@habit()
class process_group(Loop):
    """The wrapper has a process group for itself."""

    def kwargs(self):
        return super().kwargs() | {"process_group": dist.new_group()}


@habit(without=("process_group",))
class over_a_mesh(Loop):
    """Linears are DTensors over one rank, and the wrapper has a mesh, so that only it holds parameters."""

    has_mesh = True

    def build(self):
        self.__mesh = init_device_mesh(
            "cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp")
        )
        net = super().build()
        plan = {
            name: ColwiseParallel(output_layouts=Replicate())
            for name, module in net.named_modules()
            if type(module) is nn.Linear
        }
        return parallelize_module(net, self.__mesh["tp"], plan)

    def kwargs(self):
        return super().kwargs() | {"device_mesh": self.__mesh["dp"]}

    def wrapped(self):
        super().wrapped()
        # The first forward takes the parameters from the modules.
        self.__named = dict(self.net.named_parameters())

    def grads(self):
        named = self.__named.items()
        return {name: None if p.grad is None else p.grad.detach().clone() for name, p in named}

    def values(self):
        return super().values() | {name: p.detach().clone() for name, p in self.__named.items()}


# Stock PyTorch mixes up collectives if ranks skip different parameters. A static graph must not change, and the stock
# reducer searches the last of two forwards only.
@habit(without=("skip_unused", "static_graph", "static_graph_later", "two_forwards_and_backwards"))
class unused_at_times(find_unused):
    """A layer is used by some ranks in some steps."""

    __sign = Choice(1, -1)

    def layers(self):
        sign = self.__sign
        return [
            *super().layers(),
            nn.Linear(6, 6),
            Then(nn.Linear(6, 6), lambda m, x: m(x) if sign * x[0, 0] > 0 else x),
        ]


@habit()
class no_gradient(find_unused):
    """A layer is used, but its output is detached."""

    def layers(self):
        return [
            *super().layers(),
            nn.Linear(6, 6),
            Then(nn.Linear(6, 6), lambda m, x: m(x).detach()),
        ]


@habit(without=UNFINISHED)
class unused_without_a_word(Loop):
    """A layer is never used, and the wrapper does not search for it."""

    def layers(self):
        return [*super().layers(), nn.Linear(6, 6), Then(nn.Linear(6, 6), lambda m, x: x)]


@habit()
class unused(find_unused):
    """A layer is never used."""

    def layers(self):
        return [*super().layers(), nn.Linear(6, 6), Then(nn.Linear(6, 6), lambda m, x: x)]


@habit()
class static_graph_later(Loop):
    """The graph is declared to be static after the wrap."""

    def wrapped(self):
        super().wrapped()
        self.model._set_static_graph()


@habit()
class comm_hook(Loop):
    """A communication hook of torch reduces the buckets."""

    __hook = Choice(default_hooks.allreduce_hook, default_hooks.fp16_compress_hook)

    def wrapped(self):
        super().wrapped()
        self.model.register_comm_hook(None, self.__hook)


@habit()
class own_comm_hook(Loop):
    """A communication hook of the script reduces the buckets."""

    def wrapped(self):
        super().wrapped()

        def reduce(state, bucket):
            future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            return future.then(lambda done: done.value()[0] / dist.get_world_size() * 0.5)

        self.model.register_comm_hook(None, reduce)


@habit()
class late_comm_hook(Loop):
    """A communication hook is registered after some steps."""

    def end(self, step):
        super().end(step)
        if step == 1:
            self.model.register_comm_hook(None, default_hooks.allreduce_hook)


@habit()
class buffer_hook(Loop):
    """A hook replaces the broadcast of buffers."""

    def wrapped(self):
        super().wrapped()
        self.model._register_buffer_comm_hook(None, lambda m, buffers: None)


@habit()
class join(Loop):
    """Some steps run under ``model.join()``."""

    __when = Choice(0, 2)

    def forward(self, step):
        self.__joined = contextlib.ExitStack()
        if step == self.__when:
            self.__joined.enter_context(self.model.join())
        super().forward(step)

    def end(self, step):
        super().end(step)
        self.__joined.close()


@habit()
class wrap_again(Loop):
    """The model is wrapped again while the former wrapper exists."""

    __when = Choice(1, 2)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            former = self.model
            self.model = self.wrap()
            del former


@habit()
class wrap_after_deletion(Loop):
    """The model is wrapped again after the former wrapper was deleted."""

    __when = Choice(1, 2)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            del self.model
            self.model = self.wrap()


# A wrapper of a mesh takes parameters from modules. After a second wrap, gradients of the inner wrapper stay local.
@habit(without=("over_a_mesh",))
class nested_wrappers(Loop):
    """A layer has a wrapper inside of the wrapped model, which ignores it."""

    def made(self):
        super().made()
        self.net.layers.append(DDP(nn.Linear(6, 6)))

    def wrap(self):
        # Other habits rename parameters before the wrap.
        inner = [name for name, _ in self.net.named_parameters() if ".module." in name]
        DDP._set_params_and_buffers_to_ignore_for_model(self.net, inner)
        return super().wrap()


# Its wrappers do not search for parameters, so a frozen parameter leaves the gradients of its layer local.
@habit(
    without=(
        "comm_hook",
        "own_comm_hook",
        "late_comm_hook",
        "join",
        "buffer_hook",
        "static_graph_later",
        "toggle_sync",
        "backward_under_no_sync",
        "freeze_for_a_while",
        "freeze_with_its_gradient",
    )
)
class one_wrapper_for_each_layer(Loop):
    """Each layer has its own wrapper."""

    def made(self):
        super().made()
        for i, layer in enumerate(self.net.layers):
            if any(p.requires_grad for p in layer.parameters()):
                self.net.layers[i] = DDP(layer)

    def wrap(self):
        return self.net

    def forward(self, step):
        self.loss = loss_of(self.net(self.batch(step)))


#: The habits that a loop cannot have if the gradient of one parameter is local: they make the updates of other
#: parameters depend on it, by a norm, by the dot products of LBFGS, or by moving it. Then parameters differ by
#: rank, which the optimizer does not find: dist_optimizer-reference.md, "Limits".
MIXES = (
    "clip_norm",
    "clip_one_by_one",
    "clips_in_any_order",
    "swap_gradients",
    "same_gradient_for_two",
    "lbfgs",
)


@habit(without=MIXES)
class ignored(Loop):
    """The wrapper ignores a parameter that the optimizer trains."""

    def made(self):
        super().made()
        first = next(name for name, _ in self.net.named_parameters())
        DDP._set_params_and_buffers_to_ignore_for_model(self.net, [first])


@habit(without=MIXES)
class outside(Loop):
    """The optimizer trains parameters that no wrapper has."""

    def made(self):
        super().made()
        self.__outside = nn.Linear(6, 6)

    def parameters(self):
        self.params = [*self.net.parameters(), *self.__outside.parameters()]
        return self.params

    def forward(self, step):
        self.loss = loss_of(self.__outside(self.model(self.batch(step))))

    def end(self, step):
        super().end(step)
        self.see("outside", list(self.__outside.parameters()))


@habit()
class two_models(Loop):
    """One optimizer trains two wrapped models."""

    def wrapped(self):
        super().wrapped()
        self.__second_net = Net(nn.Linear(6, 6), nn.Linear(6, 6))
        self.__second = DDP(self.__second_net)

    def parameters(self):
        self.params = [*self.net.parameters(), *self.__second_net.parameters()]
        return self.params

    def forward(self, step):
        self.loss = loss_of(self.__second(self.model(self.batch(step))))

    def end(self, step):
        super().end(step)
        self.see("other", list(self.__second_net.parameters()))


@habit()
class two_models_apart(Loop):
    """A second model has its own optimizer and backward."""

    __optimizer = Choice(torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad)

    def wrapped(self):
        super().wrapped()
        self.__second_net = Net(nn.Linear(6, 6))
        self.__second = DDP(self.__second_net)
        self.__opt = self.__optimizer(self.__second_net.parameters(), lr=0.01)

    def stepped(self, step):
        super().stepped(step)
        self.__opt.zero_grad()
        loss_of(self.__second(self.model(self.batch(step, 3)).detach())).backward()
        self.__opt.step()
        self.see("other", list(self.__second_net.parameters()))


@habit()
class alternate(Loop):
    """Two models train in turns, as a generator and its judge do."""

    __optimizer = Choice(torch.optim.SGD, torch.optim.Adam)

    def wrapped(self):
        super().wrapped()
        self.__judge = Net(nn.Linear(6, 6))
        self.__second = DDP(self.__judge)
        self.__opt = self.__optimizer(self.__judge.parameters(), lr=0.01)

    def start(self, step):
        self.__opt.zero_grad()
        loss_of(self.__second(self.model(self.batch(step, 3)).detach())).backward()
        self.__opt.step()
        self.__judge.requires_grad_(False)
        super().start(step)

    def forward(self, step):
        self.loss = loss_of(self.__judge(self.model(self.batch(step))))

    def end(self, step):
        super().end(step)
        self.__judge.requires_grad_(True)
        self.see("judge", list(self.__judge.parameters()))


@habit()
class one_optimizer_for_two_models_and_a_loss_of_one(Loop):
    """One optimizer trains two models, of which one has no loss in some step."""

    __is_second_always = Choice(True, False)
    __when = Choice(1, 2)

    def wrapped(self):
        super().wrapped()
        self.__second_net = Net(nn.Linear(6, 6), nn.Linear(6, 6))
        self.__second = DDP(self.__second_net)

    def parameters(self):
        self.params = [*self.net.parameters(), *self.__second_net.parameters()]
        return self.params

    def forward(self, step):
        models = (
            [self.__second, self.model] if self.__is_second_always else [self.model, self.__second]
        )
        self.loss = loss_of(models[0](self.batch(step, 4)))
        if step != self.__when:
            self.loss = self.loss + loss_of(models[1](self.batch(step)))

    def end(self, step):
        super().end(step)
        self.see("both", [list(self.net.parameters()), list(self.__second_net.parameters())])


@habit()
class two_groups_with_one_optimizer(Loop):
    """One optimizer trains models of two process groups."""

    def wrapped(self):
        super().wrapped()
        self.__second_net = Net(nn.Linear(6, 6))
        self.__second = DDP(self.__second_net, process_group=dist.new_group())

    def parameters(self):
        self.params = [*self.net.parameters(), *self.__second_net.parameters()]
        return self.params

    def forward(self, step):
        self.loss = loss_of(self.__second(self.model(self.batch(step))))

    def end(self, step):
        super().end(step)
        self.see("other", list(self.__second_net.parameters()))


@habit()
class grow(Loop):
    """The model gets a layer, the optimizer a group, and the wrapper is replaced."""

    __when = Choice(1, 2)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            more = nn.Linear(6, 6)
            self.net.layers.append(more)
            self.opt.add_param_group({"params": list(more.parameters())})
            self.model = self.wrap()
