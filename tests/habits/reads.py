"""Habits of reading gradients, losses, parameters and state."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

from tests.habits.loop import Choice, Loop, call_in_thread, habit


@habit()
class look_at_gradients(Loop):
    """All gradients are read between the backward and the step."""

    def reduced(self, step):
        super().reduced(step)
        self.see("grads", self.grads())


@habit()
class look_at_gradients_at_times(Loop):
    """All gradients are read in some steps."""

    __should_look = Choice(lambda step: step >= 3, lambda step: step == 2, lambda step: step % 2)

    def reduced(self, step):
        super().reduced(step)
        if self.__should_look(step):
            self.see("grads", self.grads())


@habit()
class look_at_one_gradient(Loop):
    """One gradient is read."""

    __index = Choice(0, -1)

    def reduced(self, step):
        super().reduced(step)
        self.see("grad", self.params[self.__index].grad)


@habit()
class look_at_parameters(Loop):
    """All parameters are read after the step."""

    def end(self, step):
        super().end(step)
        self.see("values", self.values())


@habit()
class look_at_the_loss(Loop):
    """The loss is read."""

    def reduced(self, step):
        super().reduced(step)
        self.see("loss", self.loss)


@habit()
class look_at_state(Loop):
    """The optimizer's state is copied after each step."""

    def stepped(self, step):
        super().stepped(step)
        self.see("state", copy.deepcopy(self.opt.state_dict()))


@habit()
class look_at_state_at_times(Loop):
    """The optimizer's state is copied after one step."""

    __when = Choice(1, 2, 3)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            self.see("state", copy.deepcopy(self.opt.state_dict()))


@habit()
class look_at_the_models_state(Loop):
    """The wrapper's ``state_dict`` is read after each step."""

    def stepped(self, step):
        super().stepped(step)
        self.see("model", self.model.state_dict())


@habit()
class one_rank_looks(Loop):
    """One rank alone reads gradients, and one rank alone reads the optimizer's state."""

    __grad_reader = Choice(0, 1)
    __state_reader = Choice(0, 1, 1, 0)

    def reduced(self, step):
        super().reduced(step)
        if dist.get_rank() == self.__grad_reader:
            self.see("grads", self.grads())

    def stepped(self, step):
        super().stepped(step)
        if dist.get_rank() == self.__state_reader:
            self.see("state", copy.deepcopy(self.opt.state_dict()["state"]))


@habit()
class look_into_optimizer_state(Loop):
    """The script reads ``optimizer.state`` of each parameter."""

    def stepped(self, step):
        super().stepped(step)
        self.see("state", [dict(self.opt.state[p].items()) for p in self.opt.state])


@habit()
class state_at_the_end(Loop):
    """The optimizer's state is read after training."""

    def last(self):
        super().last()
        self.see("state", copy.deepcopy(self.opt.state_dict()))


@habit()
class gradients_at_the_end(Loop):
    """The gradients are read after training."""

    def last(self):
        super().last()
        self.see("grads", self.grads())


@habit()
class flat_gradients(Loop):
    """All gradients are copied into one tensor."""

    def reduced(self, step):
        super().reduced(step)
        found = [p.grad.reshape(-1).float() for p in self.dense() if not p.is_complex()]
        self.see("flat", torch.cat(found))


@habit()
class gradients_by_numpy(Loop):
    """A gradient is read by numpy."""

    def reduced(self, step):
        super().reduced(step)
        grad = self.params[0].grad
        if grad is not None and not grad.is_sparse and grad.dtype != torch.bfloat16:
            self.see("numpy", torch.from_numpy(grad.numpy().copy()))


@habit()
class parameters_by_numpy(Loop):
    """A parameter is read by numpy."""

    def stepped(self, step):
        super().stepped(step)
        if self.params[0].dtype != torch.bfloat16:
            self.see("numpy", torch.from_numpy(self.params[0].detach().numpy().copy()))


@habit(without=("bfloat16_layer",))
class printed(Loop):
    """Parameters and the optimizer are printed."""

    def reduced(self, step):
        super().reduced(step)
        self.see("text", [p.grad is not None and p.grad.shape == p.shape for p in self.params])

    def stepped(self, step):
        super().stepped(step)
        self.see("text", [str(self.params[0].detach()), str(self.opt)])


@habit()
class compare_parameters(Loop):
    """Parameters are compared, and turned into lists."""

    def stepped(self, step):
        super().stepped(step)
        self.see("equal", [bool((p == p).all()) for p in self.params])
        self.see("list", self.params[0].tolist() if self.params[0].numel() < 99 else None)


@habit()
class version(Loop):
    """The script reads how often each parameter was written."""

    def stepped(self, step):
        super().stepped(step)
        self.see("version", [p._version for p in self.params])


@habit()
class addresses(Loop):
    """The script reads the addresses of parameters."""

    def ready(self):
        super().ready()
        self.__at = [p.data_ptr() for p in self.params]

    def end(self, step):
        super().end(step)
        self.see(
            "moved", [p.data_ptr() == at for p, at in zip(self.params, self.__at, strict=True)]
        )


@habit()
class variables_of_the_model(Loop):
    """The script keeps a ``state_dict`` with the parameters themselves."""

    def ready(self):
        super().ready()
        self.__variables = self.net.state_dict(keep_vars=True)

    def end(self, step):
        super().end(step)
        self.see(
            "variables", {name: value.detach().clone() for name, value in self.__variables.items()}
        )


@habit()
class kept_alias(Loop):
    """The script keeps ``data`` of the parameters."""

    def ready(self):
        super().ready()
        self.__alias = [p.data for p in self.params]

    def end(self, step):
        super().end(step)
        self.see("alias", [alias.clone() for alias in self.__alias])


@habit()
class kept_views(Loop):
    """The script keeps views of the parameters."""

    def ready(self):
        super().ready()
        self.__views = [p.detach().reshape(-1) for p in self.params]

    def end(self, step):
        super().end(step)
        self.see("views", [view.clone() for view in self.__views])


@habit()
class state_dict_in_a_thread(Loop):
    """Another thread copies all state."""

    def stepped(self, step):
        super().stepped(step)
        opt, model = self.opt, self.model
        self.see(
            "states",
            call_in_thread(
                lambda: [copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())]
            ),
        )


@habit()
class inference_tensors(Loop):
    """The model and the state are read in inference mode."""

    def end(self, step):
        super().end(step)
        with torch.inference_mode():
            self.see("eval", self.net(self.batch(step, 5)))
            states = self.opt.state_dict()["state"].values()
            self.see(
                "state",
                [{k: v.clone() for k, v in s.items() if torch.is_tensor(v)} for s in states],
            )
