"""Habits of failures that scripts catch and continue after."""

from __future__ import annotations

from tests.habits.loop import Choice, Loop, habit


@habit()
class failing_forward(Loop):
    """A forward fails."""

    __when = Choice(1, 2)

    def start(self, step):
        super().start(step)
        if step == self.__when:
            try:
                self.model("no tensor")
            except Exception as error:  # noqa: BLE001 - the name of whatever is raised must be the same
                self.see("error", type(error).__name__)


@habit()
class failing_step(Loop):
    """A step fails in a hook and is repeated."""

    __when = Choice(1, 2)

    def step(self, step):
        if step == self.__when:
            handle = self.opt.register_step_pre_hook(lambda *_: 1 / 0)
            try:
                self.opt.step()
            except ZeroDivisionError:
                self.see("error", "division")
            handle.remove()
        self.opt.step()
