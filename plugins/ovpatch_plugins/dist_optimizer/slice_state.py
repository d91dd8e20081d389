"""State of element-wise optimizers: each rank keeps a slice of every tensor that has its parameter's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ovpatch.overlap.slices import Slice, elements_of
from ovpatch_plugins.dist_optimizer.forms import Form
from ovpatch_plugins.dist_optimizer.model_state import Key, StateOfModel, States

if TYPE_CHECKING:
    from ovpatch_plugins.dist_optimizer.parts import Part


class SlicesOfModel(StateOfModel):
    """The slices; what has another shape, as the number of steps, is on all ranks."""

    def put_parts(self, part: Part, states: States, stand_in: Tensor | None) -> None:
        """Make this rank's slices the stand-in's state."""
        state = states.get(part.param)
        if state is not None:
            self.cut_whole(part.param, state)
            states[stand_in] = {
                name: self._parts[key] if self._is_shown(key := (part.index, name), value) else value
                for name, value in state.items()
            }

    def take_parts(self, part: Part, states: States, stand_in: Tensor | None) -> None:
        """Keep what a step has made of them, and leave placeholders."""
        if stand_in is None or stand_in not in states:
            return
        state = states.setdefault(part.param, {})
        for name, value in states.pop(stand_in).items():
            if isinstance(value, Tensor) and value.shape == stand_in.shape:
                self._keep((part.index, name), value, state, state.get(name))
            else:
                state[name] = value

    def cut_whole(self, param: Tensor, state: dict[Any, Any]) -> None:
        """Keep this rank's slices of state that is whole, and leave placeholders."""
        index = self._index.get(id(param))
        if index is None or not self._shards.can_be_cut(index):
            return
        own = self._shards.slice(index)
        with torch._C.DisableTorchFunctionSubclass():
            shape = param.shape
        for name, value in state.items():
            if isinstance(value, Tensor) and not self._is_ours(value) and value.shape == shape:
                laid_out = value.detach()
                if value.stride() != param.stride():
                    laid_out = torch.empty_like(param, dtype=value.dtype).copy_(value)
                part = elements_of(laid_out, own).clone()
                del laid_out  # else it would count as somebody who looks into the memory
                self._keep((index, name), part, state, value)

    def _keep(self, key: Key, part: Tensor, state: dict[Any, Any], held: Any) -> None:
        self._parts[key] = part
        form = self._forms.get(key)
        if form is None or form.dtype != part.dtype:  # the rest is the parameter's, as long as it has these shards
            param = self._shards.params[key[0]]
            form = Form(param.shape, param.stride(), part.dtype, param.device)
        self._leave_placeholder(key, form, state, held)

    def _places(self, key: Key) -> Mapping[int, Slice]:
        return dict(enumerate(self._shards.slices(key[0])))
