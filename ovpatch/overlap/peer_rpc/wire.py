"""Messages between processes over TCP: a header in JSON, and the bytes of tensors.

Messages contain no pickles, with which a sender could run code. ``multiprocessing.connection`` has
no timeouts for connecting and for its handshake, so a stopped process would hang its peers. It also
copies received data twice.
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
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ovpatch.overlap.comm.lifetimes import call_after_fork, outside_modes

# The size of a nonce, and of a signature.
_NONCE_BYTES: Final = 32
_LENGTH: Final = struct.Struct("!Q")
# An envelope has names and shapes only, so a longer one comes from another program.
_MAX_ENVELOPE_BYTES: Final = 1 << 30

# The system reports the exit of a process immediately, but not a host that loses power. It sends
# probes to a silent host after this number of seconds, at this interval, and gives up after this
# number of probes without a reply.
_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


class Connection:
    """A connected socket whose operations have a deadline.

    All methods raise ``TimeoutError`` after the deadline, and ``OSError`` if the peer has closed
    the connection.

    Args:
        sock: The connected socket.
        deadline: See below. Default: none.

    Attributes:
        deadline: The end of all operations, by ``time.monotonic()``.
    """

    def __init__(self, sock: socket.socket, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self._socket = sock
        close_after_fork(sock)
        # Messages are short, and each of them needs a reply.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Send a message; the tensors must not change until this returns."""
        self.send_packed(pack(header, tensors))

    def send_packed(self, message: Message) -> None:
        """Send a message of :func:`pack`."""
        self._send_bytes(_LENGTH.pack(len(message.envelope)) + message.envelope)
        for tensor in message.tensors:
            if tensor.numel():
                self._send_bytes(_view_bytes(tensor))

    def receive(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Wait for the next message, and return its header and tensors.

        Raises:
            ConnectionError: The bytes are not a message of this module.
        """
        length = _LENGTH.unpack(self._receive_bytes(_LENGTH.size))[0]
        if length > _MAX_ENVELOPE_BYTES:
            raise ConnectionError(f"received a message with an envelope of {length} bytes")
        envelope = json.loads(self._receive_bytes(length))
        # A script may read a gradient inside of torch.func.grad or in fake mode. Tensors created
        # there have no memory.
        with outside_modes():
            tensors = [
                torch.empty(shape, dtype=_parse_dtype(name), device="cpu")
                for name, shape in envelope["tensors"]
            ]
            for tensor in tensors:
                if tensor.numel():
                    self._fill(_view_bytes(tensor))
        return envelope["header"], tensors

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self._socket.fileno()

    def authenticate(self, secret: bytes) -> None:
        """Check that the caller knows the secret, and prove that this server does.

        Raises:
            PermissionError: The caller does not know the secret.
        """
        server_nonce = os.urandom(_NONCE_BYTES)
        self._send_bytes(server_nonce)
        client_nonce = self._receive_bytes(_NONCE_BYTES)
        signature = self._receive_bytes(_NONCE_BYTES)
        # compare_digest() takes the same time for all signatures.
        expected = _sign(secret, b"client", server_nonce, client_nonce)
        if not hmac.compare_digest(signature, expected):
            raise PermissionError("the caller does not know the secret of this process")
        self._send_bytes(_sign(secret, b"server", client_nonce, server_nonce))

    def reply_to_challenge(self, secret: bytes) -> bytes:
        """Prove to :meth:`authenticate` of the server that this caller knows the secret.

        Returns:
            The signature that the server must send.
        """
        server_nonce = self._receive_bytes(_NONCE_BYTES)
        client_nonce = os.urandom(_NONCE_BYTES)
        self._send_bytes(client_nonce + _sign(secret, b"client", server_nonce, client_nonce))
        return _sign(secret, b"server", client_nonce, server_nonce)

    def verify_signature(self, signature: bytes) -> None:
        """Check that the server sends the expected signature.

        Raises:
            PermissionError: The server sends another signature.
        """
        if not hmac.compare_digest(self._receive_bytes(_NONCE_BYTES), signature):
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
                raise ConnectionResetError("the peer hung up")
            view = view[count:]

    def _set_timeout(self) -> None:
        remaining_s = self.deadline - time.monotonic()
        # A timeout of 0 would make the socket non-blocking.
        if remaining_s <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(None if remaining_s == math.inf else remaining_s)


class Message(NamedTuple):
    """A message that can be sent without further checks.

    Attributes:
        envelope: The header, dtypes and shapes, in JSON.
        tensors: Contiguous CPU tensors.
    """

    envelope: bytes
    tensors: Sequence[Tensor]


def pack(header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> Message:
    """Return a message.

    Args:
        header: JSON values.
        tensors: Dense CPU tensors, but none with elements of less than a byte.

    Raises:
        TypeError: The header or a tensor cannot be sent.
    """
    plain = [_make_plain(tensor) for tensor in tensors]
    kinds = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in plain]
    return Message(json.dumps({"header": header, "tensors": kinds}).encode(), plain)


def _make_plain(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(
            f"a {tensor.layout} tensor of {tensor.dtype} cannot be sent; send its dense parts"
        )
    if tensor.device.type != "cpu":
        raise TypeError(f"a tensor on {tensor.device} cannot be sent; copy it to the CPU first")
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _parse_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConnectionError(f"received a tensor of dtype {name!r}, which this torch lacks")
    return dtype


def _view_bytes(tensor: Tensor) -> memoryview:
    """Return a view of the memory of a contiguous tensor, which must outlive the view."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _sign(secret: bytes, role: bytes, *nonces: bytes) -> bytes:
    # Without the role, a process could replay the signature of one side to the other side.
    return hmac.new(secret, role + b"".join(nonces), hashlib.sha256).digest()


def close_after_fork(*sockets: socket.socket) -> None:
    """Close the copies of sockets in forked children.

    While a child has a copy open, peers do not detect that the parent has exited.
    """
    for sock in sockets:
        call_after_fork(sock, _close)


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.close()
