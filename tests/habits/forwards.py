"""Habits of forwards and backwards: what a loss is made of, how often it is used, and what runs around it."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.habits.loop import Choice, Loop, Net, call_in_thread, habit, loss_of


@habit()
class two_forwards(Loop):
    """A loss is made of two forwards."""

    def forward(self, step):
        self.loss = loss_of(self.model(self.batch(step))) + loss_of(self.model(self.batch(step, 1)))


# Stock PyTorch raises that its reducer has a bug if a parameter is frozen between the two.
@habit(without=("freeze_for_a_while",))
class two_forwards_and_backwards(Loop):
    """Two forwards are followed by two backwards."""

    def forward(self, step):
        former = loss_of(self.model(self.batch(step, 1)))
        super().forward(step)
        former.backward()


@habit()
class retain_graph(Loop):
    """The backward keeps its graph."""

    def backward(self, step):
        self.loss.backward(retain_graph=True)


@habit()
class twice_backward(Loop):
    """A loss has two backwards."""

    def backward(self, step):
        self.loss.backward(retain_graph=True)
        self.loss.backward()


# Stock PyTorch takes the first backward of a static graph for this one, and leaves the other one local.
@habit(without=("static_graph", "static_graph_later"))
class autograd_grad_before(Loop):
    """``autograd.grad`` runs before the backward."""

    def before(self, step):
        super().before(step)
        trained = [p for p in self.params if p.requires_grad]
        self.see(
            "direct", torch.autograd.grad(self.loss, trained, retain_graph=True, allow_unused=True)
        )


@habit(without=("static_graph", "static_graph_later"))
class gradient_penalty(Loop):
    """The loss has the gradient of the inputs."""

    def forward(self, step):
        x = self.batch(step).requires_grad_()
        out = self.model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        self.loss = loss_of(out) + 0.1 * slope.square().mean()


@habit()
class backward_by_autograd(Loop):
    """``torch.autograd.backward`` computes the gradients."""

    def backward(self, step):
        torch.autograd.backward([self.loss])


# Stock PyTorch waits for the embedding, whose gradient never comes: its next forward raises.
@habit(without=("sparse_adam",))
class backward_for_some(Loop):
    """A backward names the parameters that get gradients."""

    def backward(self, step):
        self.loss.backward(inputs=[p for p in self.params if p.requires_grad])


@habit()
class part_of_the_output(Loop):
    """The loss has a part of the output."""

    __rows = Choice(slice(None, 2), slice(1, 3))

    def forward(self, step):
        self.loss = loss_of(self.model(self.batch(step))[self.__rows])


class _Several(Net):
    """A model that returns a container."""

    def __init__(self, pack, *layers):
        super().__init__(*layers)
        self.pack = pack

    def forward(self, x):
        return self.pack(super().forward(x))


def _pack_tuple(y):
    return (y, y.sum())


def _pack_list(y):
    return [y, None, 2 * y]


def _pack_dict(y):
    return {"a": y, "b": (y, 1)}


@habit()
class several_outputs(Loop):
    """The model returns a tuple, a list or a dictionary."""

    __pack = Choice(_pack_tuple, _pack_list, _pack_dict)

    def build(self):
        return _Several(self.__pack, *super().build().layers)

    def forward(self, step):
        out = self.model(self.batch(step))
        self.loss = loss_of(out["a"] if isinstance(out, dict) else out[0])


@habit()
class evaluate(Loop):
    """The wrapper is evaluated between steps."""

    __mode = Choice(torch.no_grad, torch.inference_mode)

    def start(self, step):
        if step % 2:
            self.model.eval()
            with self.__mode():
                self.see("eval", self.model(self.batch(step, 5)))
            self.model.train()
        super().start(step)


@habit()
class evaluate_the_module(Loop):
    """The model inside of the wrapper is evaluated."""

    def end(self, step):
        super().end(step)
        with torch.no_grad():
            self.see("eval", self.net(self.batch(step, 5)))


@habit()
class eval_mode(Loop):
    """The model trains in evaluation mode."""

    def ready(self):
        super().ready()
        self.model.eval()


# Stock PyTorch takes the unused parameters of the last forward for those of the backward.
@habit(without=("unused_at_times",))
class forward_without_backward(Loop):
    """A forward has no backward."""

    __when = Choice(0, 2)

    def before(self, step):
        super().before(step)
        if step == self.__when:
            self.model(self.batch(step, 7))


# After the wrapper's forward, stock PyTorch reduces this backward instead: ddp-reference.md, "Differences".
@habit(without=("static_graph", "static_graph_later"))
class around_the_wrapper(Loop):
    """A backward of the model inside of the wrapper is not reduced."""

    __when = Choice(0, 2)

    def start(self, step):
        super().start(step)
        if step == self.__when:
            loss_of(self.net(self.batch(step, 7))).backward()


@habit()
class autocast(Loop):
    """The forward runs under autocast."""

    __kwargs = Choice({}, {"cache_enabled": False})

    def forward(self, step):
        with torch.autocast("cpu", dtype=torch.bfloat16, **self.__kwargs):
            super().forward(step)


@habit()
class scaler(Loop):
    """A ``GradScaler`` scales the loss, of which one is infinite."""

    __scale = Choice(4.0, 1024.0)
    __overflow = Choice(1, 9)
    __is_unscaled = Choice(True, False)

    def ready(self):
        super().ready()
        self.__scaler = torch.amp.GradScaler("cpu", init_scale=self.__scale, growth_interval=2)

    def backward(self, step):
        self.__scaler.scale(self.loss * (float("inf") if step == self.__overflow else 1)).backward()

    def step(self, step):
        if self.__is_unscaled:
            self.__scaler.unscale_(self.opt)
        self.__scaler.step(self.opt)
        self.__scaler.update()

    def end(self, step):
        super().end(step)
        self.see("scale", self.__scaler.get_scale())


@habit()
class functional_call(Loop):
    """A part of the loss calls the model as a function of its parameters."""

    def forward(self, step):
        super().forward(step)
        params = dict(self.net.named_parameters())
        self.loss = self.loss + 0.1 * loss_of(
            torch.func.functional_call(self.net, params, (self.batch(step, 1),))
        )


# The stock reducer of an inner wrapper may fail inside of a transform.
@habit(without=("nested_wrappers",))
class functional_gradients(Loop):
    """``torch.func.grad`` computes gradients before the backward."""

    def before(self, step):
        super().before(step)
        inputs = (self.batch(step, 6),)

        def compute(params):
            return loss_of(torch.func.functional_call(self.net, params, inputs))

        self.see("functional", torch.func.grad(compute)(dict(self.net.named_parameters())))


# The stock reducer wants a sparse gradient, and that of ovpatch takes a dense one as well: ddp-reference.md.
@habit(without=("sparse_embedding", "sparse_adam", "find_unused"))
class penalty(Loop):
    """The loss has the squares of the parameters."""

    def forward(self, step):
        super().forward(step)
        self.loss = self.loss + 0.01 * sum(p.abs().square().sum().float() for p in self.params)


# As for penalty. The stock reducer marks what the forward left out as ready when the loss begins, and raises when a
# gradient of that comes; the reducer of ovpatch reduces it. A static graph ends its first backward where
# that passes an output. After another wrap this one may be the first: stock PyTorch then silently leaves
# its gradients local, and ovpatch raises in the next forward.
@habit(
    without=(
        "sparse_embedding",
        "sparse_adam",
        "find_unused",
        "unused",
        "static_graph",
        "static_graph_later",
    )
)
class loss_of_the_parameters_alone(Loop):
    """The loss of one step has no outputs."""

    __when = Choice(1, 2)

    def forward(self, step):
        super().forward(step)
        if step == self.__when:
            self.loss = sum(p.abs().sum().float() for p in self.params) * 0.1


@habit()
class backward_in_a_thread(Loop):
    """The backward runs in another thread."""

    def backward(self, step):
        call_in_thread(self.loss.backward)


@habit()
class anomaly_mode(Loop):
    """The backward detects anomalies."""

    def backward(self, step):
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            self.loss.backward()


@habit()
class inputs_with_gradients(Loop):
    """The inputs get gradients."""

    def forward(self, step):
        self.__x = self.batch(step).requires_grad_()
        self.loss = loss_of(self.model(self.__x))

    def reduced(self, step):
        super().reduced(step)
        self.see("input", self.__x.grad)


@habit()
class retained_activations(Loop):
    """An output keeps its gradient."""

    def forward(self, step):
        self.__out = self.model(self.batch(step))
        self.__out.retain_grad()
        self.loss = loss_of(self.__out)

    def reduced(self, step):
        super().reduced(step)
        self.see("activation", self.__out.grad)


@habit()
class saved_on_cpu(Loop):
    """Activations are kept on the CPU."""

    def forward(self, step):
        with torch.autograd.graph.save_on_cpu():
            super().forward(step)


@habit()
class checkpoint_of_the_model(Loop):
    """The forward of the wrapped model is recomputed."""

    def made(self):
        super().made()
        inner = self.net.forward
        self.net.forward = lambda x: checkpoint(inner, x, use_reentrant=False)


@habit()
class uneven_batches(Loop):
    """The batch size differs by rank."""

    def forward(self, step):
        self.loss = loss_of(self.model(self.batch(step)[: 2 + dist.get_rank()]))


@habit()
class frozen_copies(Loop):
    """A frozen copy of the model is part of the loss."""

    def ready(self):
        super().ready()
        self.__first = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, step):
        self.loss = loss_of(self.model(self.batch(step)) - self.__first(self.batch(step)))


@habit()
class update_batch_norm(Loop):
    """``update_bn`` calls the model without a backward."""

    __when = Choice(1, 2)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            torch.optim.swa_utils.update_bn([self.batch(9), self.batch(8)], self.net)


@habit()
class tensor_hook(Loop):
    """A hook of the loss changes its gradient."""

    def before(self, step):
        super().before(step)
        self.loss.register_hook(lambda grad: 2 * grad)


@habit()
class hooks_on_nodes(Loop):
    """A node of the graph has a hook."""

    def before(self, step):
        super().before(step)
        if self.loss.grad_fn is not None:
            self.loss.grad_fn.register_hook(lambda *_: None)


@habit()
class module_hooks(Loop):
    """A layer has hooks for its forward and its backward."""

    __is_early = Choice(True, False)

    def made(self):
        super().made()
        if self.__is_early:
            self.__hook()

    def wrapped(self):
        super().wrapped()
        if not self.__is_early:
            self.__hook()

    def __hook(self):
        self.net.layers[0].register_forward_hook(lambda m, args, out: None)
        self.net.layers[0].register_full_backward_hook(lambda m, grad_in, grad_out: None)


@habit()
class steps_before_the_wrap(Loop):
    """The model trains one step before it is wrapped."""

    def made(self):
        super().made()
        self.__raw = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        loss_of(self.net(self.batch(50))).backward()
        for p in self.net.parameters():
            if p.grad is not None and not p.grad.is_sparse:
                dist.all_reduce(p.grad)
        self.__raw.step()

    def last(self):
        super().last()
        self.see("raw", self.__raw.state_dict()["state"])
