"""Habits of state: scripts copy, save, load, clear and write the state of optimizers and models."""

from __future__ import annotations

import collections
import copy
import io
import pickle

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.habits.loop import Choice, Loop, Net, habit


def _as_is(value):
    return value


@habit()
class copy_optimizer(Loop):
    """The optimizer is deep-copied."""

    __when = Choice(1, 2)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            self.see("copy", copy.deepcopy(self.opt).state_dict())


@habit()
class pickle_optimizer(Loop):
    """The optimizer is pickled."""

    __when = Choice(1, 2)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            self.see("copy", pickle.loads(pickle.dumps(self.opt)).state_dict())


@habit()
class copy_wrapper(Loop):
    """The wrapper is deep-copied, and the copy is called."""

    __when = Choice(1, 2)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            copied = copy.deepcopy(self.model)
            self.see("copied", list(copied.parameters()))
            self.see("output", copied(self.batch(step, 8)))


@habit()
class continue_with_a_copy(Loop):
    """Training continues with a copy of the model and a new optimizer that loads the state."""

    __copied = Choice(_as_is, copy.deepcopy)

    def end(self, step):
        super().end(step)
        if step == 1:
            self.net = copy.deepcopy(self.net)
            self.model = self.wrap()
            self.params = list(self.net.parameters())
            self.opt.zero_grad()
            old = self.opt.state_dict()
            self.opt = type(self.opt)(self.params, lr=0.01)
            self.opt.load_state_dict(self.__copied(old))


@habit()
class continue_with_copies_of_both(Loop):
    """Training continues with one copy of model and optimizer."""

    __when = Choice(1, 2)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            self.net, self.opt = copy.deepcopy((self.net, self.opt))
            self.params = list(self.net.parameters())
            self.model = self.wrap()


@habit()
class continue_with_pickles_of_both(Loop):
    """Training continues with a model and an optimizer that load a file."""

    __when = Choice(1, 2)

    def build(self):
        return Net(*self.layers() or [nn.Linear(6, 6)])

    def end(self, step):
        super().end(step)
        if step == self.__when and len(self.params) == 2:
            file = io.BytesIO()
            torch.save((self.net.state_dict(), self.opt.state_dict()), file)
            file.seek(0)
            states = torch.load(file)
            self.net = Net(nn.Linear(6, 6))
            self.model = self.wrap()
            if self.net.state_dict().keys() == states[0].keys():
                self.net.load_state_dict(states[0])
                self.params = list(self.net.parameters())
                self.opt = type(self.opt)(self.params, lr=0.01)
                self.opt.load_state_dict(states[1])


@habit()
class drop_the_optimizer(Loop):
    """The optimizer is deleted, and a new one loads its state."""

    __when = Choice(1, 2)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            saved = copy.deepcopy(self.opt.state_dict())
            kind = type(self.opt)
            del self.opt
            self.opt = kind(self.params, lr=0.01)
            self.opt.load_state_dict(saved)


@habit()
class load(Loop):
    """The optimizer loads its own state."""

    __when = Choice(1, 2)
    __copied = Choice(_as_is, copy.deepcopy, copy.deepcopy, _as_is)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            self.opt.load_state_dict(self.__copied(self.opt.state_dict()))


@habit()
class load_what_was(Loop):
    """Model and optimizer go back to an earlier step."""

    __when = Choice(2, 3)
    __model = Choice(lambda loop: loop.net, lambda loop: loop.model.module)

    def stepped(self, step):
        super().stepped(step)
        if step == 1:
            self.__saved = (
                copy.deepcopy(self.opt.state_dict()),
                copy.deepcopy(self.net.state_dict()),
            )

    def end(self, step):
        super().end(step)
        if step == self.__when:
            self.opt.load_state_dict(self.__saved[0])
            self.__model(self).load_state_dict(self.__saved[1])


@habit()
class save_and_load(Loop):
    """Model and optimizer are saved to a file and loaded in a later step."""

    __weights_only = Choice(True, False)

    def stepped(self, step):
        super().stepped(step)
        if step == 1:
            self.__file = io.BytesIO()
            torch.save([self.model.state_dict(), self.opt.state_dict()], self.__file)

    def end(self, step):
        super().end(step)
        if step == 2:
            self.__file.seek(0)
            saved = torch.load(self.__file, weights_only=self.__weights_only)
            self.model.load_state_dict(saved[0])
            self.opt.load_state_dict(saved[1])


@habit()
class load_with_assign(Loop):
    """The model loads its state by assignment."""

    def stepped(self, step):
        super().stepped(step)
        if step == 2:
            self.net.load_state_dict(
                {k: v.clone() for k, v in self.net.state_dict().items()}, assign=True
            )


@habit()
class load_before_the_wrap(Loop):
    """Model and optimizer load their state before training."""

    def made(self):
        super().made()
        self.net.load_state_dict(self.net.state_dict())

    def ready(self):
        super().ready()
        self.opt.load_state_dict(self.opt.state_dict())


@habit()
class load_another_kinds_state(Loop):
    """Training continues with a new optimizer, after another one was created."""

    __when = Choice(1, 2)
    __optimizer = Choice(torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            spare = self.__optimizer(self.params, lr=0.01)
            self.see("empty", spare.state_dict())
            state = copy.deepcopy(self.opt.state_dict())
            self.opt = type(self.opt)(self.params, lr=0.02)
            self.opt.load_state_dict(state)


# A thread that does not step gets a copy: dist_optimizer-reference.md, "Limits". In stock PyTorch, the optimizer of a
# copied model shares the tensors of the dict that it loads, so its steps change the dict that is kept.
# A step after state was removed is an error, and a dict that is kept over a load is a copy: "State and checkpoints" in
# the same list.
@habit(without=("step_in_a_thread", "continue_with_a_copy", "clear_state", "forget_state", "load"))
class unread_state_dict(Loop):
    """A ``state_dict`` is kept for some steps before the optimizer loads it."""

    __when = Choice(2, 3)

    def stepped(self, step):
        super().stepped(step)
        if step == 1:
            self.__kept = self.opt.state_dict()

    def end(self, step):
        super().end(step)
        if step == self.__when:
            self.opt.load_state_dict(self.__kept)


@habit()
class get_and_set_state_dict(Loop):
    """The functions of distributed checkpoints read and write all state."""

    __when = Choice(1, 2)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            states = get_state_dict(self.model, self.opt)
            self.see("states", states)
            model_state, optim_state = copy.deepcopy(states[0]), copy.deepcopy(states[1])
            set_state_dict(
                self.model, self.opt, model_state_dict=model_state, optim_state_dict=optim_state
            )


@habit()
class clear_state(Loop):
    """The script clears ``optimizer.state``."""

    def end(self, step):
        super().end(step)
        if step == 2:
            self.opt.state.clear()


@habit()
class forget_state(Loop):
    """The script removes the state of a parameter."""

    __when = Choice(1, 2)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            self.opt.state.pop(self.params[0], None)


@habit()
class write_state(Loop):
    """The script scales the optimizer's state in place."""

    def end(self, step):
        super().end(step)
        if step == 2:
            for p in self.opt.state:
                for v in self.opt.state[p].values():
                    if torch.is_tensor(v) and v.is_floating_point() and v.dim():
                        v.mul_(0.5)


@habit()
class replace_state(Loop):
    """The script replaces ``optimizer.state``."""

    __when = Choice(1, 2)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            self.opt.state = collections.defaultdict(
                dict, {p: dict(s) for p, s in self.opt.state.items()}
            )


@habit()
class move_state(Loop):
    """The script replaces the tensors of state."""

    __when = Choice(1, 2)
    __moved = Choice(
        lambda v: v.cpu(),
        lambda v: v.clone(),
        lambda v: v.detach(),
        lambda v: v.to(torch.float64).to(v.dtype),
    )

    def end(self, step):
        super().end(step)
        if step == self.__when:
            for state in self.opt.state.values():
                for key, value in state.items():
                    if torch.is_tensor(value):
                        state[key] = self.__moved(value)
