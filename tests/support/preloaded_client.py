"""Asks the server of ``preloaded`` for a process, and ends as that does.

    python preloaded_client.py SOCKET RANKS SCRIPT ...

It imports little: it is started for each run, in place of an interpreter that imports torch.
"""

import os
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

if __name__ == "__main__":
    address, *call = sys.argv[1:]
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(address)
    variables = [f"{name}={value}" for name, value in os.environ.items()]
    message = "\0".join([os.getcwd(), str(len(call)), *call, *variables])
    socket.send_fds(server, [message.encode("utf-8", "surrogateescape")], [0, 1, 2])
    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: server.send(bytes([number])))
    code = int(server.recv(16) or b"1")
    if code < 0:
        # A process cannot handle these signals.
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
