"""Habits of accumulation: several backwards for one step, some of them without a reduction."""

from __future__ import annotations

import contextlib

from tests.habits.loop import Choice, Loop, habit, loss_of


@habit()
class accumulate(Loop):
    """The gradients of all microbatches but the last stay local: ``with model.no_sync()``."""

    def forward(self, step):
        for micro in range(2):
            with self.model.no_sync():
                loss_of(self.model(self.batch(step, micro + 1))).backward()
        super().forward(step)


@habit()
class accumulate_and_sync(Loop):
    """Each microbatch is reduced."""

    def forward(self, step):
        for micro in range(2):
            loss_of(self.model(self.batch(step, micro + 1))).backward()
        super().forward(step)


@habit()
class toggle_sync(Loop):
    """The loop sets ``require_backward_grad_sync`` itself."""

    def forward(self, step):
        self.model.require_backward_grad_sync = False
        loss_of(self.model(self.batch(step, 1))).backward()
        self.model.require_backward_grad_sync = True
        super().forward(step)


@habit()
class accumulate_at_times(Loop):
    """The gradients of every second step stay local and are still used for a step."""

    def forward(self, step):
        with self.model.no_sync() if step % 2 else contextlib.nullcontext():
            super().forward(step)
            self.loss.backward()

    def backward(self, step):
        pass


@habit()
class all_local(Loop):
    """No gradient is ever reduced."""

    def forward(self, step):
        with self.model.no_sync():
            super().forward(step)
            self.loss.backward()

    def backward(self, step):
        pass


@habit()
class microbatches_by_step(Loop):
    """The number of microbatches differs by step."""

    def forward(self, step):
        for micro in range(step % 3):
            with self.model.no_sync():
                loss_of(self.model(self.batch(step, micro + 1))).backward()
        super().forward(step)


@habit()
class forward_under_no_sync(Loop):
    """A forward runs under ``no_sync``, and its backward outside of it."""

    __steps = Choice((1,), (2, 3, 4, 5))

    def forward(self, step):
        with self.model.no_sync() if step in self.__steps else contextlib.nullcontext():
            super().forward(step)


@habit()
class backward_under_no_sync(Loop):
    """A backward runs under ``no_sync``, and its forward outside of it."""

    __when = Choice(1, 2)

    def backward(self, step):
        with self.model.no_sync() if step == self.__when else contextlib.nullcontext():
            self.loss.backward()
