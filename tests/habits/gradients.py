"""Habits of hands on gradients: scripts change, replace, keep and reduce them, and hook into them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.habits.loop import Choice, Loop, habit, loss_of, mean_of


def _scale_by_replacing(p):
    p.grad = p.grad * 0.5


def _scale_by_dividing(p):
    p.grad /= 3


def _find_alike(params):
    """Return the parameters that may have the gradient of the first one.

    Fused optimizers of stock PyTorch pair the elements of a parameter and its gradient by their places
    in memory. So a gradient with other strides would give other results.
    """
    first = params[0]
    return [
        p
        for p in params
        if p.shape == first.shape and p.dtype == first.dtype and p.stride() == first.stride()
    ]


@habit()
class scale_gradients(Loop):
    """All gradients are scaled."""

    __scale = Choice(
        lambda p: p.grad.mul_(0.5),
        _scale_by_replacing,
        _scale_by_dividing,
        lambda p: p.grad.data.div_(3),
        lambda p: torch._foreach_mul_([p.grad], 0.5),
    )

    def reduced(self, step):
        super().reduced(step)
        for p in self.params:
            if p.grad is not None:
                self.__scale(p)


@habit()
class scale_gradients_at_times(Loop):
    """Some gradients of one step are scaled."""

    __when = Choice(2, 3)
    __stride = Choice(1, 2)
    __scale = Choice(lambda p: p.grad.mul_(0.5), _scale_by_replacing)

    def reduced(self, step):
        super().reduced(step)
        if step == self.__when:
            for p in self.params[:: self.__stride]:
                if p.grad is not None:
                    self.__scale(p)


@habit()
class drop_a_gradient(Loop):
    """One gradient is dropped in some steps."""

    __is_dropped = Choice(lambda step: step == 2, lambda step: step % 2, lambda step: True)
    __index = Choice(0, -1)

    def reduced(self, step):
        super().reduced(step)
        if self.__is_dropped(step):
            self.params[self.__index].grad = None


@habit()
class zero_a_gradient(Loop):
    """One gradient is filled with zeros in some steps."""

    __is_zeroed = Choice(lambda step: step == 2, lambda step: step % 2)

    def reduced(self, step):
        super().reduced(step)
        if self.__is_zeroed(step) and self.params[0].grad is not None:
            self.params[0].grad.zero_()


# Stock PyTorch refuses a gradient that is not sparse.
@habit(without=("sparse_embedding",))
class own_gradient(Loop):
    """The script gives a parameter another gradient."""

    def reduced(self, step):
        super().reduced(step)
        self.params[-1].grad = torch.ones_like(self.params[-1])


# Torch refuses to add to such a gradient. With views, stock PyTorch copies it into a bucket in the second
# forward, which rebuilds the buckets, and so refuses a step later.
@habit(without=("fused", "views"))
class expanded_gradient(Loop):
    """The script gives a parameter a gradient whose elements share memory."""

    __index = Choice(0, -1)

    def reduced(self, step):
        super().reduced(step)
        p = self.params[self.__index]
        p.grad = torch.tensor(0.1, dtype=p.dtype).expand_as(p)


# The fused kernels of torch for the CPU ignore the layout.
@habit(without=("fused",))
class gradient_of_another_layout(Loop):
    """The script replaces gradients by transposed ones."""

    def reduced(self, step):
        super().reduced(step)
        for p in self.dense():
            if p.dim() == 2:
                p.grad = p.grad.t().contiguous().t()


# In stock PyTorch this moves the views of the reducer.
@habit(without=("views",))
class data_of_a_gradient(Loop):
    """The script replaces the data of gradients."""

    def reduced(self, step):
        super().reduced(step)
        for p in self.dense():
            p.grad.data = p.grad.data * 0.5


@habit()
class noise(Loop):
    """The script adds noise to all gradients."""

    def reduced(self, step):
        super().reduced(step)
        generator = torch.Generator().manual_seed(step)
        for p in self.params:
            if p.grad is not None:
                p.grad.add_(torch.randn(p.shape, generator=generator).to(p.dtype), alpha=0.01)


@habit()
class all_reduce_again(Loop):
    """The script reduces all gradients itself."""

    def reduced(self, step):
        super().reduced(step)
        for p in self.dense():
            dist.all_reduce(p.grad)


@habit()
class asynchronous_collective(Loop):
    """The script reduces all gradients concurrently."""

    def reduced(self, step):
        super().reduced(step)
        works = [dist.all_reduce(p.grad, async_op=True) for p in self.dense()]
        for work in works:
            work.wait()


@habit()
class reduce_gradients_to_one(Loop):
    """The script reduces a gradient to rank 0 and broadcasts it."""

    def reduced(self, step):
        super().reduced(step)
        if self.params[0].grad is not None and not self.params[0].grad.is_sparse:
            dist.reduce(self.params[0].grad, 0)
            dist.broadcast(self.params[0].grad, 0)


# With views stock PyTorch writes one gradient over the other: its values differ from those without views.
@habit(without=("views",))
class swap_gradients(Loop):
    """Two parameters swap their gradients."""

    def reduced(self, step):
        super().reduced(step)
        same = _find_alike(self.params)
        same[0].grad, same[-1].grad = same[-1].grad, same[0].grad


# One tensor for two gradients throughout a backward holds what the reducers copy at other moments.
@habit()
class same_gradient_for_two(Loop):
    """Two parameters have one gradient during a step."""

    def reduced(self, step):
        super().reduced(step)
        self.__same = _find_alike(self.params)
        self.__same[-1].grad = self.__same[0].grad

    def end(self, step):
        self.__same[-1].grad = None
        super().end(step)


# The next backward writes into the views that are kept: ddp-reference.md, "Options".
@habit(without=("views",))
class keep_gradients(Loop):
    """The script keeps gradients until the end of a step."""

    def reduced(self, step):
        super().reduced(step)
        self.__kept = [p.grad for p in self.params]

    def end(self, step):
        super().end(step)
        self.see("kept", [None if grad is None else grad.clone() for grad in self.__kept])


# The stock reducer wants the gradient of a parameter that is frozen by then. If the step computes the
# gradients, the local backward comes before the first one of the wrapper, and stock PyTorch takes it
# for the first iteration of a static graph: later backwards of the wrapper stay local.
@habit(without=("freeze_for_a_while", "freeze_later", "closure"))
class save_and_restore_gradients(Loop):
    """The script puts gradients aside, runs a local backward, and restores them."""

    def reduced(self, step):
        super().reduced(step)
        saved = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None
        loss_of(self.net(self.batch(step, 4))).backward()
        self.see("local", self.grads())
        for p, grad in zip(self.params, saved, strict=True):
            p.grad = grad


@habit(without=("views", "sparse_embedding", "sparse_adam"))
class gradients_as_views_of_one(Loop):
    """The script makes gradients views of one tensor."""

    def ready(self):
        super().ready()
        # Each view must have the strides of its parameter, see `_find_alike`.
        self.__dense = [p for p in self.params if p.dtype == torch.float32 and p.is_contiguous()]
        self.__flat = torch.zeros(sum(p.numel() for p in self.__dense))

    def start(self, step):
        super().start(step)
        place = 0
        for p in self.__dense:
            p.grad = self.__flat[place : place + p.numel()].view(p.shape)
            place += p.numel()
        self.__flat.zero_()

    def reduced(self, step):
        super().reduced(step)
        self.see("flat", self.__flat)


@habit()
class gradient_hook(Loop):
    """Tensor hooks scale gradients, and are registered after the wrap."""

    __factor = Choice(0.5, 2)

    def wrapped(self):
        super().wrapped()
        factor = self.__factor
        for p in self.trained():
            p.register_hook(lambda grad: grad * factor)


@habit()
class gradient_hook_before(Loop):
    """Tensor hooks scale gradients, and are registered before the wrap."""

    __factor = Choice(0.5, 2)

    def made(self):
        super().made()
        factor = self.__factor
        for p in self.trained():
            p.register_hook(lambda grad: grad * factor)


@habit()
class hooks_come_and_go(Loop):
    """Tensor hooks exist in one step."""

    __when = Choice(1, 2)

    def start(self, step):
        super().start(step)
        trained = [p for p in self.params if p.requires_grad] if step == self.__when else []
        self.__handles = [p.register_hook(lambda grad: grad * 0.5) for p in trained]

    def end(self, step):
        super().end(step)
        for handle in self.__handles:
            handle.remove()


@habit()
class post_accumulate_hook(Loop):
    """Hooks read gradients as soon as they are accumulated."""

    def wrapped(self):
        super().wrapped()
        self.__means = []
        for p in self.trained():
            p.register_post_accumulate_grad_hook(self.__read)

    def __read(self, p):
        self.__means.append(mean_of(p.grad))

    def end(self, step):
        super().end(step)
        self.see("means", sorted(self.__means))
        self.__means.clear()


@habit()
class hooks_on_accumulation(Loop):
    """The nodes that accumulate gradients have hooks."""

    __is_before = Choice(True, False)

    def wrapped(self):
        super().wrapped()
        self.__nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in self.trained()]
        for node in self.__nodes:
            if self.__is_before:
                node.register_prehook(lambda grads: (grads[0] * 0.5,))
            else:
                node.register_hook(lambda *_: None)


@habit()
class module_hook_that_reads_gradients(Loop):
    """A hook of a layer reads which gradients exist during the backward."""

    def wrapped(self):
        super().wrapped()
        self.net.layers[0].register_full_backward_hook(
            lambda *_: self.see("during", [p.grad is None for p in self.net.parameters()])
        )


@habit()
class scale_in_a_step_hook(Loop):
    """A hook of the optimizer scales gradients."""

    __scale = Choice(lambda p: p.grad.mul_(0.5), _scale_by_replacing)

    def ready(self):
        super().ready()
        scale = self.__scale

        def halve(opt, args, kwargs):
            for group in opt.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        scale(p)

        self.opt.register_step_pre_hook(halve)
