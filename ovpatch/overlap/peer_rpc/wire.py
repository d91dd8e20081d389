"""Messages between processes over TCP: a header in JSON, and tensors as their bytes.

[Note: sockets] `multiprocessing.connection` knows no time-out, neither for connecting nor for its handshake: a process
that is stopped would hang whoever asks it, and a stranger that says nothing the listener. It also copies what it
receives twice. Here a tensor is received where it stays.

[Note: no pickle] Whoever can send a pickle can run code. A message is data: what it cannot be is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import json
import math
import os
import socket
import struct
import time
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

# Bytes of what is to be signed, and of a signature.
_NONCE = 32

_LENGTH = struct.Struct("!Q")

# An envelope holds names and shapes. What claims to be longer is no message of ours.
_LONGEST = 1 << 30

# Seconds of silence until the system asks whether the other host is still there, between two such questions, and how
# many may stay unanswered. A process that dies is noticed at once, a host that loses power so.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class Connection:
    """One connection. Everything on it has to be through by ``deadline``, in seconds of ``time.monotonic()``.

    Args:
        sock: A connected socket; the line closes it.
        deadline: When to give up.

    Raises:
        TimeoutError: From any method, when the time is over.
        OSError: From any method, when the other side is gone.
    """

    def __init__(self, sock: socket.socket, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self._socket = sock
        _lines.add(self)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Send a message. The tensors' memory is read until this returns."""
        self.post(pack(header, tensors))

    def post(self, message: Message) -> None:
        """Send a message that was packed before."""
        self._put(_LENGTH.pack(len(message.envelope)) + message.envelope)
        for tensor in message.tensors:
            if tensor.numel():
                self._put(_bytes_of(tensor))

    def receive(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Return header and tensors of the next message; waits for all of it."""
        length = _LENGTH.unpack(self._take(_LENGTH.size))[0]
        if length > _LONGEST:
            raise ConnectionError(f"a message that claims an envelope of {length} bytes")
        envelope = json.loads(self._take(length))
        tensors = [torch.empty(shape, dtype=_dtype(name), device="cpu") for name, shape in envelope["tensors"]]
        for tensor in tensors:
            if tensor.numel():
                self._fill(_bytes_of(tensor))
        return envelope["header"], tensors

    def close(self) -> None:
        """Hang up."""
        _lines.discard(self)
        self._socket.close()

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self._socket.fileno()

    def challenge(self, secret: bytes) -> None:
        """Let in who knows the secret, and show that this side knows it too.

        Raises:
            PermissionError: The other side does not know the secret.
        """
        ours = os.urandom(_NONCE)
        self._put(ours)
        theirs, signature = self._take(_NONCE), self._take(_NONCE)
        if not hmac.compare_digest(signature, _sign(secret, b"asks", ours, theirs)):
            raise PermissionError("the other side does not know this process's secret")
        self._put(_sign(secret, b"answers", theirs, ours))

    def introduce(self, secret: bytes) -> bytes:
        """Answer the other side's challenge; return the signature by which it has to show that it knows the secret."""
        theirs, ours = self._take(_NONCE), os.urandom(_NONCE)
        self._put(ours + _sign(secret, b"asks", theirs, ours))
        return _sign(secret, b"answers", ours, theirs)

    def verify(self, signature: bytes) -> None:
        """Check the other side's signature.

        Raises:
            PermissionError: It is another one.
        """
        if not hmac.compare_digest(self._take(_NONCE), signature):
            raise PermissionError("another process listens there")

    def _put(self, data: bytes | memoryview) -> None:
        self._limit()
        self._socket.sendall(data)

    def _take(self, count: int) -> bytes:
        buffer = bytearray(count)
        self._fill(memoryview(buffer))
        return bytes(buffer)

    def _fill(self, view: memoryview) -> None:
        while view:
            self._limit()
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionResetError("the other side hung up")
            view = view[count:]

    def _limit(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(None if left == math.inf else left)

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Message:
    """A message whose every part is known to be sendable.

    Args:
        envelope: Header, dtypes and shapes, in JSON.
        tensors: Contiguous CPU tensors.
    """

    def __init__(self, envelope: bytes, tensors: Sequence[Tensor]) -> None:
        self.envelope = envelope
        self.tensors = tensors


def pack(header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> Message:
    """Return the message.

    Args:
        header: JSON values.
        tensors: Dense tensors on the CPU, of any dtype that has whole bytes.

    Raises:
        TypeError: A tensor or a value of the header is of a kind that cannot be sent.
    """
    plain = [_plain(tensor) for tensor in tensors]
    kinds = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in plain]
    return Message(json.dumps({"header": header, "tensors": kinds}).encode(), plain)


def _plain(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"a {tensor.layout} tensor of {tensor.dtype} cannot be sent; send its dense parts")
    if tensor.device.type != "cpu":
        raise TypeError(f"a tensor on {tensor.device} cannot be sent; copy it to the CPU first")
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConnectionError(f"a tensor of dtype {name!r}, which this torch does not have")
    return dtype


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return a contiguous tensor's memory. It is the tensor's: keep that as long as the view is used."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _sign(secret: bytes, role: bytes, *nonces: bytes) -> bytes:
    # With the role in it, a signature cannot be had from one side to be shown to the other.
    return hmac.new(secret, role + b"".join(nonces), hashlib.sha256).digest()


_lines: weakref.WeakSet[Connection] = weakref.WeakSet()


def _hang_up_in_child() -> None:
    """Close a forked child's copies of all lines; with those open, nobody would see it when this process ends."""
    for line in list(_lines):
        with contextlib.suppress(OSError):
            line.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_hang_up_in_child)
