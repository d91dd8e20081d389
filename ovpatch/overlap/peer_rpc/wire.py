"""Messages between processes over TCP: a header in JSON, and tensors as their bytes.

There is no pickle, which would let a sender run code. ``multiprocessing.connection`` has no time-outs for connecting
and for its handshake, so that a stopped process would hang its peers, and it copies twice what it receives.
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
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ovpatch.overlap.comm.lifetimes import call_after_fork, outside_modes

_NONCE = 32  # bytes of a nonce, and of a signature
_LENGTH = struct.Struct("!Q")
_LONGEST = 1 << 30  # bytes of an envelope, which holds names and shapes; a longer one is no message of ours

# Seconds of silence until the system probes the other host, between two probes, and how many may stay unanswered. The
# end of a process is noticed at once; that of a host, which loses power, by these probes.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


class Connection:
    """A connected socket with a deadline for everything on it, in seconds of ``time.monotonic()``.

    Any method raises TimeoutError when the time is over, and OSError when the other side is gone.
    """

    def __init__(self, sock: socket.socket, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self._socket = sock
        close_after_fork(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Send a message. The tensors' memory is read until this returns."""
        self.send_packed(pack(header, tensors))

    def send_packed(self, message: Message) -> None:
        """Send a message from :func:`pack`."""
        self._send_bytes(_LENGTH.pack(len(message.envelope)) + message.envelope)
        for tensor in message.tensors:
            if tensor.numel():
                self._send_bytes(_bytes_of(tensor))

    def receive(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Wait for the next message; return its header and tensors."""
        length = _LENGTH.unpack(self._receive_bytes(_LENGTH.size))[0]
        if length > _LONGEST:
            raise ConnectionError(f"a message that claims an envelope of {length} bytes")
        envelope = json.loads(self._receive_bytes(length))
        # A script may read a gradient inside of torch.func.grad or a fake mode, whose tensors have no memory.
        with outside_modes():
            tensors = [torch.empty(shape, dtype=_dtype(name), device="cpu") for name, shape in envelope["tensors"]]
            for tensor in tensors:
                if tensor.numel():
                    self._fill(_bytes_of(tensor))
        return envelope["header"], tensors

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self._socket.fileno()

    def authenticate(self, secret: bytes) -> None:
        """Check that the other side knows the secret, or raise PermissionError, and show that this side does."""
        ours = os.urandom(_NONCE)
        self._send_bytes(ours)
        theirs, signature = self._receive_bytes(_NONCE), self._receive_bytes(_NONCE)
        if not hmac.compare_digest(signature, _sign(secret, b"asks", ours, theirs)):
            raise PermissionError("the other side does not know this process's secret")
        self._send_bytes(_sign(secret, b"answers", theirs, ours))

    def reply_to_challenge(self, secret: bytes) -> bytes:
        """Answer the other side's :meth:`authenticate`; return the signature that it has to send in turn."""
        theirs, ours = self._receive_bytes(_NONCE), os.urandom(_NONCE)
        self._send_bytes(ours + _sign(secret, b"asks", theirs, ours))
        return _sign(secret, b"answers", ours, theirs)

    def verify_signature(self, signature: bytes) -> None:
        """Check the signature that the other side sends; raise PermissionError if it is a different one."""
        if not hmac.compare_digest(self._receive_bytes(_NONCE), signature):
            raise PermissionError("another process listens there")

    def _send_bytes(self, data: bytes | memoryview) -> None:
        self._set_timeout()
        self._socket.sendall(data)

    def _receive_bytes(self, count: int) -> bytes:
        buffer = bytearray(count)
        self._fill(memoryview(buffer))
        return bytes(buffer)

    def _fill(self, view: memoryview) -> None:
        while view:
            self._set_timeout()
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionResetError("the other side hung up")
            view = view[count:]

    def _set_timeout(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(None if left == math.inf else left)


class Message(NamedTuple):
    """A message whose parts can all be sent."""

    envelope: bytes  # header, dtypes and shapes, in JSON
    tensors: Sequence[Tensor]  # contiguous CPU tensors


def pack(header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> Message:
    """Return a message of a header, JSON values, and dense CPU tensors of any dtype with whole bytes, or TypeError."""
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
    """Return a view of a contiguous tensor's memory. The tensor must outlive the view."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _sign(secret: bytes, role: bytes, *nonces: bytes) -> bytes:
    # The role keeps a signature of one side from being replayed to the other.
    return hmac.new(secret, role + b"".join(nonces), hashlib.sha256).digest()


def close_after_fork(*sockets: socket.socket) -> None:
    """Have forked children close their copies of sockets: while those are open, peers do not see the parent end."""
    for one in sockets:
        call_after_fork(one, _close)


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.close()
