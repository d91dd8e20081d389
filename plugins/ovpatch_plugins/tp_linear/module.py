"""A linear that ``parallelize_module`` cut over the ranks, taken over."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ovpatch_plugins.tp_linear.tp_linear import TPLinear


class Linear(nn.Linear):
    """Stock's ``nn.Linear`` but for where the collectives are; its class is this one as long as the feature is on.

    [Note: the class of a linear] Instance attributes that hide ``forward`` break copying and pickling, and a patch of
    ``nn.Linear.forward`` would concern every linear there is. So the object gets another class, of the same name and in
    a module, which keeps ``isinstance``, ``repr``, ``deepcopy``, pickling and FSDP2's own change of classes.
    """

    _ovpatch_parallel: TPLinear

    def forward(self, input: Tensor) -> Any:
        """Return what stock returns: a local tensor, or a DTensor if the style says so."""
        return self._ovpatch_parallel.forward(self, input)

    forward.__annotations__ = dict(nn.Linear.forward.__annotations__)  # for who asks for the signature
