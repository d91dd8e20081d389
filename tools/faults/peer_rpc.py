"""The faults in ``ovpatch/overlap/peer_rpc/``."""

from __future__ import annotations

from typing import Final

from tools.faults.fault import Fault

_RPC: Final = "ovpatch/overlap/peer_rpc/"
_SHARDING_TESTS: Final = "tests/plugins/dist_optimizer/"

FAULTS: Final = (
    Fault(
        "a reader gets the state of another step",
        "ovpatch/overlap/peer_rpc/sequence_lock.py",
        "                return self._begun_version > version\n",
        "                return False\n",
        ("tests/overlap/test_versioned.py",),
    ),
    Fault(
        "retention: a rank drops shards that a slower peer reads",
        "ovpatch/overlap/peer_rpc/retention.py",
        "if self.list_awaited():",
        "if False:",
        ("tests/overlap/test_retention.py",),
    ),
    Fault(
        "retention: an object that is retained again loses its final reads",
        _RPC + "retention.py",
        "            final_reads = final_reads or known.final_reads\n",
        "",
        ("tests/overlap/test_retention.py",),
    ),
    Fault(
        "retention: a rank that has destroyed its group serves no final call",
        _RPC + "rpc.py",
        "    return not retention.has_retained(group())",
        "    return True",
        (_SHARDING_TESTS + "test_turned_off.py",),
    ),
    Fault(
        "retention: a rank that has destroyed its group exits before the final calls",
        _RPC + "rpc.py",
        "            ranks = self._list_awaited()",
        "            ranks = []",
        ("tests/overlap/test_peers_end.py::test_so_it_does_if_the_group_was_destroyed_before",),
    ),
    Fault(
        "a call waits for a store whose host cannot be reached",
        _RPC + "client.py",
        "found = results.get(timeout=timeout_s)",
        "found = results.get()",
        (
            "tests/overlap/test_peers_server.py::test_a_store_that_never_replies_ends_no_later_than_the_call",
        ),
    ),
    Fault(
        "retention: objects outlive their backwards",
        "ovpatch/overlap/peer_rpc/retention.py",
        "        retained.remaining_backwards -= 1\n",
        "",
        ("tests/overlap/test_retention.py",),
    ),
    Fault(
        "retention: a forked child calls peers",
        "ovpatch/overlap/peer_rpc/rpc.py",
        "if os.getpid() != self._pid:",
        "if False:",
        (
            "tests/overlap/test_peers_server.py::test_a_fork_is_not_a_rank_and_does_not_affect_its_parent",
        ),
    ),
    Fault(
        "a finalizer waits for the lock of the server",
        _RPC + "server.py",
        """            if self._handlers.get(topic) is handler:
                self._handlers.pop(topic, None)
""",
        """            with self._changed:
                self._handlers.pop(topic, None)
""",
        ("tests/overlap/test_peers_server.py::test_a_handler_is_withdrawn_without_the_lock",),
    ),
    Fault(
        "retention: the state of an optimizer that ends is not kept for a peer that ends later",
        _RPC + "retention.py",
        "                retain(self._group, owner, backwards, self)\n",
        "                retain(self._group, owner, 1, self)\n",
        ("tests/overlap/test_retention.py",),
    ),
    Fault(
        "state that peers may read is dropped after one backward",
        _RPC + "retention.py",
        "retained.remaining_backwards -= 1",
        "retained.remaining_backwards = 0",
        (_SHARDING_TESTS + "test_same_work.py",),
    ),
    Fault(
        "a read that is due before a backward is left out",
        _RPC + "retention.py",
        "retention.before_backward.pop()()",
        "retention.before_backward.pop()",
        (_SHARDING_TESTS + "test_state_dict.py",),
    ),
    Fault(
        "the end of a rank waits for each rank of a lost host",
        _RPC + "client.py",
        "                self._silent_hosts.append(call.endpoint.addresses)\n",
        "                pass\n",
        ("tests/overlap/test_peers_server.py::test_all_ranks_of_a_lost_host_take_the_time_of_one",),
    ),
)
