"""Habits of turning features on and off, and options of features."""

from __future__ import annotations

from typing import Any

from tests.habits.loop import Choice, Loop, habit


@habit()
class apply_after_the_net(Loop):
    """Features are turned on between the model and the wrap."""

    switches = True

    def turn_on(self):
        pass

    def made(self):
        super().made()
        super().turn_on()


@habit()
class default_options(Loop):
    """``apply()`` chooses the features."""

    applies_defaults = True
    switches = True

    def turn_on(self):
        self.package.apply(options={"ddp": self.options()["ddp"]})


@habit()
class ddp_alone(Loop):
    """Only the reducer is turned on."""

    switches = True

    def turn_on(self):
        self.package.apply("ddp", options={"ddp": self.options()["ddp"]})


def _option(name: str, doc: str, feature: str, option: str, *values: Any) -> None:
    """Add a habit that gives a feature an option."""

    def options(self):
        found = super(cls, self).options()
        found[feature][option] = getattr(self, f"_{name}__value")
        return found

    members = {
        "__doc__": doc,
        "switches": True,
        "options": options,
        f"_{name}__value": Choice(*values),
    }
    cls = type(name, (Loop,), members | {"__module__": __name__})
    habit()(cls)


_option(
    "default_size",
    "Small parameters are not sharded.",
    "dist_optimizer",
    "min_param_numel",
    16384,
    8,
    37,
)
_option(
    "no_gather_overlap",
    "The step waits for parameters.",
    "dist_optimizer",
    "overlap_param_gather",
    False,
)
_option(
    "gather_by_parts",
    "Gathers are cut by layers.",
    "dist_optimizer",
    "gather_granularity",
    "layer",
    "module",
)
_option("small_gathers", "Gathers are small.", "dist_optimizer", "gather_bucket_mb", 1e-4, 1e-3)
_option(
    "few_gradients_in_flight",
    "Backwards wait for earlier gradients.",
    "dist_optimizer",
    "grads_in_flight_mb",
    1e-4,
    1e-3,
    0,
)
_option(
    "no_reduce_overlap",
    "Gradients are reduced after the backward.",
    "ddp",
    "overlap_grad_reduce",
    False,
)
_option("granularity", "Buckets are cut by layers.", "ddp", "bucket_granularity", "layer", "module")


@habit()
class revert(Loop):
    """Features are turned off after a step."""

    switches = True
    __when = Choice(1, 2, 3)

    def stepped(self, step):
        super().stepped(step)
        if step == self.__when:
            self.package.revert()


@habit()
class revert_early(Loop):
    """Features are turned off before gradients are zeroed."""

    switches = True
    __when = Choice(2, 3)

    def start(self, step):
        if step == self.__when:
            self.package.revert()
        super().start(step)


@habit()
class revert_and_apply(Loop):
    """Features are turned off and on again while a model is wrapped."""

    switches = True
    __when = Choice(1, 2)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            self.package.revert()
            super().turn_on()


@habit()
class revert_and_wrap_again(Loop):
    """Features are turned off and on again, and the model is wrapped again."""

    switches = True
    __when = Choice(1, 2)

    def end(self, step):
        super().end(step)
        if step == self.__when:
            self.package.revert()
            super().turn_on()
            former = self.model
            self.model = self.wrap()
            del former
