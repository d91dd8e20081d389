"""Gradients of fp32 that are a cast of one in half precision, which is made when somebody looks.

[Note: cast when read] The gradient of a parameter that autocast casts comes in half precision, and the backward of the
cast makes one of fp32 of it: a pass over memory, which is lost on whoever only sends the gradient to other ranks. Until
somebody reads it, ``p.grad`` is a placeholder here, and the gradient in half precision is what it knows.

[Note: its stream] Whoever is given a gradient by the engine runs behind the stream that computed it. This one is given
to nobody, so who reads it waits for that stream himself; and that stream for him, since those who come after him know
of no other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ovpatch.overlap import placeholders
from ovpatch.overlap.placeholders import Placeholder


class _Widening:
    """The source of such placeholders: their key is the gradient in half precision, and the handle of its stream."""

    def fetch(self, placeholders: Sequence[Placeholder], *, noticed: bool) -> list[Tensor]:
        """Return the casts."""
        del noticed
        producers = [_join_producer(*one.key) for one in placeholders]
        contents = widened([one.key[0] for one in placeholders])
        for content, producer in zip(contents, producers, strict=True):
            if producer is not None:
                producer.wait_stream(torch.cuda.current_stream(content.device))
                content.record_stream(producer)
        return contents


def _join_producer(half: Tensor, stream: int) -> torch.cuda.Stream | None:
    """Have the current stream wait for the one that computed a gradient; return that, if it is another."""
    if not half.is_cuda or torch._C._cuda_getCurrentRawStream(half.device.index) == stream:
        return None
    producer = torch.cuda.ExternalStream(stream, half.device)
    reader = torch.cuda.current_stream(half.device)
    reader.wait_stream(producer)
    half.record_stream(reader)
    return producer


_WIDENING = _Widening()


def make(param: torch.nn.Parameter, half: Tensor) -> Placeholder:
    """Return a gradient for a parameter of fp32, of the values of one in half precision that nobody changes."""
    stream = torch._C._cuda_getCurrentRawStream(half.device.index) if half.is_cuda else 0
    return placeholders.make(param, _WIDENING, (half, stream), dtype=torch.float32)


def half_of(grad: Tensor | None) -> Tensor | None:
    """Return what a gradient is a cast of, as long as nobody has read it."""
    source, key = placeholders.origin(grad)
    return key[0] if source is _WIDENING and key is not None else None


def memory_of(grad: Tensor) -> Tensor:
    """Return whose memory a gradient's values are in."""
    half = half_of(grad)
    return grad if half is None else half


def widened(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients in fp32. What torch does for lists reads half precision in vectors; ``to()`` does not."""
    if not grads[0].is_cuda or torch.is_grad_enabled():
        return [grad.to(torch.float32) for grad in grads]
    wide = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
    torch._foreach_copy_(wide, list(grads))
    return wide
