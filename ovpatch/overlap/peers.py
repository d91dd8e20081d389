"""stub"""

import threading, weakref, uuid, json
from multiprocessing.connection import Client, Listener
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


class PeerError(RuntimeError): ...


_all = weakref.WeakKeyDictionary()


class Peers:
    @classmethod
    def of(cls, group):
        if group not in _all:
            _all[group] = cls(group)
        return _all[group]

    def __init__(self, group):
        self.store = c10d._get_process_group_store(group)
        self.rank = group.rank()
        self.world = group.size()
        self.key = uuid.uuid4().hex
        self.topics = {}
        self.listener = Listener(("127.0.0.1", 0), authkey=self.key.encode())
        self.store.set(f"ovpeers/{self.rank}", json.dumps([list(self.listener.address), self.key]))
        threading.Thread(target=self.loop, daemon=True).start()

    def loop(self):
        while True:
            c = self.listener.accept()
            threading.Thread(target=self.handle, args=(c,), daemon=True).start()

    def handle(self, c):
        topic, q = c.recv()
        try:
            c.send(("ok", self.topics[topic](q)))
        except Exception as e:
            c.send(("err", repr(e)))
        c.close()

    def serve(self, topic, answer):
        self.topics[topic] = answer
        return lambda: self.topics.pop(topic, None)

    def ask(self, topic, question, ranks=None, timeout_s=None):
        out = {}
        for r in ranks if ranks is not None else [r for r in range(self.world) if r != self.rank]:
            a, k = json.loads(self.store.get(f"ovpeers/{r}"))
            c = Client(tuple(a), authkey=k.encode())
            c.send((topic, question))
            kind, x = c.recv()
            if kind == "err":
                raise PeerError(x)
            out[r] = x
        return out
