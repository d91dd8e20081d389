"""Habits of zeroing gradients."""

from __future__ import annotations

from tests.habits.loop import Choice, Loop, habit

_EITHER = ({}, {"set_to_none": False})


@habit()
class zero_in_place(Loop):
    """Gradients are filled with zeros."""

    def start(self, step):
        self.opt.zero_grad(set_to_none=False)


@habit()
class zero_by_model(Loop):
    """The model zeroes its gradients."""

    __kwargs = Choice(*_EITHER)

    def start(self, step):
        self.model.zero_grad(**self.__kwargs)


@habit()
class zero_after_step(Loop):
    """Gradients are zeroed at the end of a step."""

    __kwargs = Choice(*_EITHER)

    def start(self, step):
        pass

    def end(self, step):
        super().end(step)
        self.opt.zero_grad(**self.__kwargs)


@habit()
class zero_before_backward(Loop):
    """Gradients are zeroed between the forward and the backward."""

    __kwargs = Choice(*_EITHER)

    def start(self, step):
        pass

    def before(self, step):
        super().before(step)
        self.opt.zero_grad(**self.__kwargs)


@habit()
class zero_at_times(Loop):
    """Gradients of two steps are summed."""

    __kwargs = Choice(*_EITHER)

    def start(self, step):
        if step % 2:
            self.opt.zero_grad(**self.__kwargs)


@habit()
class never_zero(Loop):
    """Gradients of all steps are summed."""

    def start(self, step):
        pass


@habit()
class zero_by_hand(Loop):
    """The script drops gradients itself."""

    def start(self, step):
        for p in self.params:
            p.grad = None


@habit()
class zero_grads_by_hand(Loop):
    """The script fills gradients with zeros itself."""

    __zero = Choice(lambda grad: grad.zero_(), lambda grad: grad.detach().zero_())

    def start(self, step):
        for p in self.params:
            if p.grad is not None:
                self.__zero(p.grad)
