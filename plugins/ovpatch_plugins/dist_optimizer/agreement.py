"""Votes in which the ranks of a process group agree to shard the next step."""

from __future__ import annotations

import hashlib
import logging
import numbers
import time
import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from threading import Condition
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ovpatch.overlap.comm.consensus import (
    describe_missing,
    known_hosts,
    name_group_ranks,
    wait_limit_s,
)
from ovpatch.overlap.comm.lifetimes import (
    group_state,
    group_values,
    outside_modes,
    reset_after_fork,
    weak_method,
)
from ovpatch.overlap.comm.step_communicators import abort_step_communicators, step_communicator
from ovpatch.overlap.peer_rpc.rpc import PeerError, PeerRpc
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor, iterate_leaves
from ovpatch.overlap.tensors.pending_param import wait_for_args

#: The longest wait for peers at an optimizer's first step, in seconds. A peer may save a checkpoint
#: before.
FIRST_STEP_TIMEOUT_S = 300.0

#: The time after which a waiting rank logs a warning, in seconds.
WARNING_DELAY_S = 5.0

# The time after which a waiting rank searches for ranks that wait for each other.
_SEARCH_PERIOD_S: Final = 1.0
_SEARCH_PERIOD: Final = timedelta(seconds=_SEARCH_PERIOD_S)

# Replies in a search are immediate, but a chain of ranks has one reply for each of them.
_REPLY_TIMEOUT_S: Final = 10.0

_log = logging.getLogger("ovpatch.dist_optimizer")

_REMEDY: Final = (
    "If the script shards the work itself, as ZeroRedundancyOptimizer does, nothing is wrong. "
    "Otherwise create the "
    "same optimizers on every rank, and step them in the same order."
)

_REASON_ORDER: Final = (
    "ranks stepped, clipped or unscaled optimizers in orders that differ (a set has none), or with "
    "gradients of different parameters, so no optimizer of the process group is sharded"
)

_REASON_MISSING: Final = (
    "a rank did not reach a step that its peers have reached, because it waited for them elsewhere "
    "or came too late, so no optimizer of the process group is sharded"
)

_WARNING_WAITING: Final = (
    "{} waits for the first step of this optimizer on its peers, for up to {:g} s: {}. {}"
)

#: The name of votes among the operations of a process group. Backwards have their model's name.
VOTES: Final = ""

# The outcomes of a vote on one rank. The largest one of all ranks counts.
_AGREES: Final = 0
# The rank leaves the models of this vote to torch.
_LEAVES: Final = 1
# The rank leaves all models of the process group to torch.
_ENDS: Final = 2

#: The bits of a number in a vote, since votes are tensors of int32.
VOTE_MASK: Final = (1 << 30) - 1
# Less than each hash and its negative, so that it changes no maximum.
_NOT_COMPARED: Final = -(1 << 30)

#: The hashes of a rank that compares nothing; see :func:`make_hashes`.
NO_HASHES: Final = (_NOT_COMPARED,) * 4

_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

# Options that choose an implementation, and change no more than the rounding.
_IMPLEMENTATIONS: Final = frozenset({"foreach", "fused", "capturable", "differentiable"})

# The words that a hash reads at a time, which bounds its memory if tensors are contiguous.
_CHUNK_WORDS: Final = 1 << 20

# Votes that a rank keeps for slower peers. Hosts of GPUs do not wait in votes, and run ahead by
# less than this.
_MAX_KEPT_VOTES: Final = 64


@dataclass(frozen=True)
class OptimizerName:
    """The name of an optimizer over one model, the same on all ranks.

    Attributes:
        terms: The optimizer's class and its parameters of the model.
        number: Its number among the optimizers of the model with these terms.
    """

    terms: str
    number: int

    def __str__(self) -> str:
        return f"{self.terms}, number {self.number}"


def list_terms(optimizer: Optimizer, names: Iterable[str]) -> str:
    """Return the terms of an optimizer: its class and its parameters of one model.

    They must be the same on all ranks.
    """
    known = sorted(names)
    digest = hashlib.sha256("\n".join(known).encode()).hexdigest()[:12]
    cls = type(optimizer)
    return f"{cls.__module__}.{cls.__qualname__} of {len(known)} parameters from {known[0]} to {known[-1]} ({digest})"


def hash_options(optimizer: Optimizer, group: Mapping[str, Any]) -> int | None:
    """Return the hash of the options of a group that the optimizer's class defines."""
    # Options of the script, such as a path or names, may differ by rank and change no update.
    known = sorted(optimizer.defaults.keys() - _IMPLEMENTATIONS, key=str)
    return hash_content([group.get(key) for key in known])


def make_hashes(params: Sequence[Any], state: Sequence[Any]) -> tuple[int, ...]:
    """Return the hash of parameters and their options, its negative, and the same of state.

    Of the largest numbers of all ranks, each two are a number and its negative if hashes are equal.
    """
    hashes = [
        (_NOT_COMPARED, _NOT_COMPARED) if found is None else (found, -found)
        for found in map(hash_content, (params, state))
    ]
    return (*hashes[0], *hashes[1])


def _are_equal(largest: Sequence[int]) -> bool:
    """Return whether ranks have the same hashes, from the largest numbers of all ranks."""
    return all(
        high in (-low, _NOT_COMPARED) for high, low in zip(largest[::2], largest[1::2], strict=True)
    )


def hash_content(values: Sequence[Any]) -> int | None:
    """Return 30 bits that depend on each bit of the values, and on their order.

    Values are tensors, numbers, strings, and lists, tuples and mappings of these. Others do not count,
    nor do tensors whose memory is not all of their content, such as sparse ones and wrapper subclasses.
    The result is None if a tensor is lazy: its content is the same on all ranks, but the rank would have
    to read it.
    """
    facts: list[str] = []
    sums: dict[torch.device, list[Tensor]] = {}
    # The weights of words, and memory for weighted words.
    buffers: dict[torch.device, tuple[Tensor, Tensor]] = {}
    with outside_modes(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        wait_for_args(values)
        leaves = list(iterate_leaves(values))
        num_words = max((_count_words(leaf) for leaf in leaves if _is_plain(leaf)), default=0)
        for leaf in leaves:
            if isinstance(leaf, LazyTensor):
                return None
            if _is_plain(leaf):
                facts.append(f"{tuple(leaf.shape)} {leaf.dtype}")
                if leaf.device not in buffers:
                    weights = _make_weights(num_words).to(leaf.device)
                    buffers[leaf.device] = weights, torch.empty_like(weights)
                sums.setdefault(leaf.device, []).extend(_sum_chunks(leaf, *buffers[leaf.device]))
            elif isinstance(leaf, numbers.Number):
                # Equal numbers of all types have one hash, but each NaN has its own.
                facts.append("nan" if leaf != leaf else str(hash(leaf)))
            elif isinstance(leaf, str):
                facts.append(repr(leaf))
        # A device is read once, after all of its kernels were launched.
        found = [torch.stack(device_sums).tolist() for device_sums in sums.values() if device_sums]
    return zlib.crc32(repr((facts, found)).encode()) & VOTE_MASK


def _is_plain(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not (value.is_meta or value.is_nested or value.is_quantized)
        and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def _count_words(tensor: Tensor) -> int:
    """Return the most words that :func:`_sum_chunks` reads."""
    return tensor.numel() * max(tensor.element_size() // 2, 1)


def _make_weights(num_words: int) -> Tensor:
    """Return random weights for the words of the largest tensor, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    shape = (min(num_words, _CHUNK_WORDS),)
    # An odd number times a word that changed is another number.
    return torch.randint(1 << 62, shape, generator=generator, dtype=torch.int64) * 2 + 1


def _sum_chunks(tensor: Tensor, weights: Tensor, buffer: Tensor) -> Iterator[Tensor]:
    """Yield sums of the weighted words of a tensor; a sum of integers is exact in any order."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    # The sign of a word of 64 bits would only count as odd or even.
    word = _WORDS[min(flat.element_size(), 4)]
    step = _CHUNK_WORDS * 4 // max(flat.element_size(), 4)
    for begin in range(0, flat.numel(), step):
        words = flat[begin : begin + step].contiguous().view(word)
        weighted = buffer[: words.numel()].copy_(words)
        yield weighted.mul_(weights[: words.numel()]).sum()


@dataclass(frozen=True)
class Vote:
    """The vote of one rank.

    Attributes:
        tag: 30 bits that name the next action of the rank.
        text: A description of an optimizer that steps for the first time; "" in other votes.
        outcome: The least outcome that this rank accepts.
        spans_groups: Whether the optimizer has models of several process groups.
        hashes: The hashes of parameters and options, and of state, before they get shards
            (:func:`make_hashes`).
    """

    tag: int
    text: str = ""
    outcome: int = _AGREES
    spans_groups: bool = False
    hashes: Sequence[int] = NO_HASHES


class StepVotes:
    """The votes of one process group in steps: ranks agree before they change what is sharded.

    [Note: the same everywhere] What one rank alone updates cannot be gathered from all ranks. A
    script may step an optimizer on one rank only, or over other parameters on each rank, or two
    optimizers in orders that differ, and PyTorch does not mind. So each vote carries a tag of the
    rank's next action, which includes all collectives until the next vote. Votes pair by position. If
    tags differ, ranks do not run the same steps: no rank of the group votes again, and torch runs
    all steps. The first vote of a group is a call to all peers, later ones are all-reduces. Hosts
    that run ahead call peers in each optimizer's first vote only. A digest of their later votes is
    the tag of the next barrier of a step.

    A rank may wait in a vote for a peer that waits for this rank in a vote of another process
    group, or in a backward of another model. So a rank that waits for some time searches the chain
    of operations that ranks are inside of and that the next rank has not reached. If the chain
    leads back, no rank of it will ever move. The searching rank then calls the missing ranks, and
    they promise to end the votes once they reach this one. One promise is final. Each link is
    checked on the rank that it leads to. A rank of the chain cannot leave its operation before the
    next rank reaches it, so a closed chain is no coincidence.

    Attributes:
        reason: The fact that ends the votes, as a clause without a remedy; "" as long as ranks vote.
            A warning and the report show it for each optimizer that falls back.
        spans_groups: Whether some rank's optimizer of the last vote has models of several process
            groups.
        is_content_equal: Whether the ranks that compared hashes in the last vote had the same.
        has_peers_ahead: Whether peers have voted on other work, and continued with it, while this
            rank has voted on the first step of an optimizer.
        reached: The operations that this rank has begun, by name: the number of the newest one.
        inside: The operations that this rank cannot leave without its peers, likewise.
        digest: A digest of the votes that this rank has cast without waiting for its peers.
        num_optimizers: The number of optimizers on which ranks have agreed.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.reason = ""
        self.spans_groups = False
        self.is_content_equal = True
        self.has_peers_ahead = False
        self.reached: dict[str, int] = {VOTES: 0}
        self.inside: dict[str, int] = {}
        self.digest = 0
        self.num_optimizers = 0

        # - The group
        self._group = weakref.ref(group)
        self._rank = group.rank()
        self._peers = [rank for rank in range(group.size()) if rank != self._rank]
        self._topic = f"step votes on {device.type}"
        self._timeout_s = wait_limit_s(group, FIRST_STEP_TIMEOUT_S)
        # torch's fake backend has one process for all ranks, so there is no peer to call.
        self.calls_peers = dist.get_backend(group) != "fake"

        # - Votes by calls
        # The newest votes of this rank by number, for slower peers.
        self._votes: dict[int, Vote] = {}
        # The newest vote that this rank has promised to end; see [Note: the same everywhere].
        self._ended_vote = 0
        self._changed = Condition()
        # The newest vote for which this rank has warned that it waits.
        self._warned_vote = 0
        reset_after_fork(self, "_changed", Condition)

        # - Votes by all-reduce
        self._device = device
        # Whether ranks have a communicator. They create it once they have agreed on an optimizer,
        # since all ranks must do so at the same place.
        self._is_connected = False
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        # The votes that this rank has left without waiting for them.
        self._left: deque[tuple[int, dist.Work, torch.Tensor]] = deque()
        if self.calls_peers:
            withdraw = PeerRpc.for_group(group).register(self._topic, weak_method(self._reply))
            weakref.finalize(self, withdraw)

    @classmethod
    def for_group(cls, group: dist.ProcessGroup, device: torch.device) -> StepVotes:
        """Return the votes of a group on a type of device, created by the first call.

        They last as long as the group, also beyond ``revert()`` and another ``apply()``.
        """
        return group_state(group).get_or_create(
            (StepVotes, device.type), lambda: cls(group, device)
        )

    # ---------------------------------------------------------------- voting

    def agree(self, vote: Vote, *, waits: bool) -> bool:
        """Return whether all ranks vote on the same action and no rank leaves; all ranks call this.

        A rank that leaves does not wait for its peers, because it continues alone, perhaps forever.

        Args:
            vote: The vote of this rank.
            waits: Whether hosts wait for each other in each vote. Otherwise they do so at first
                steps only.
        """
        self.spans_groups = False
        self.is_content_equal = True
        self.has_peers_ahead = False
        if self.reason:
            return False
        if waits and self._is_connected:
            # The tensor of a vote must not inherit the script's modes, such as fake tensors.
            with outside_modes():
                return self._all_reduce(vote)
        number, is_ended = self._cast(vote)
        if vote.outcome or is_ended:
            return False
        if (waits or vote.text) and not self._call_peers(number, vote):
            return False
        if waits:
            group = self._group()
            assert group is not None
            step_communicator(group, self._device)
            self._is_connected = True
        return True

    def _cast(self, vote: Vote) -> tuple[int, bool]:
        """Record a vote; return its number, and whether this rank has promised to end it."""
        with self._changed:
            self.reached[VOTES] = number = self.reached[VOTES] + 1
            is_ended = number <= self._ended_vote
            self._votes[number] = Vote(vote.tag, outcome=_ENDS) if is_ended else vote
            self._votes.pop(number - _MAX_KEPT_VOTES, None)
            self._changed.notify_all()
        if is_ended:
            self._end(_REASON_MISSING)
        return number, is_ended

    def _end(self, reason: str) -> None:
        with self._changed:
            self.reason = self.reason or reason
            self._changed.notify_all()
        group = self._group()
        if group is not None:
            abort_step_communicators(group)

    def _all_reduce(self, vote: Vote) -> bool:
        # A vote that this rank has left ends before its next one can. Peers may have found there
        # that tags differ, and then vote no more.
        while self._left and not vote.outcome:
            self._wait(*self._left.popleft(), vote)
            if self.reason:
                return False
        self.reached[VOTES] = number = self.reached[VOTES] + 1
        outcome = vote.outcome
        if number <= self._ended_vote:
            outcome = _ENDS
            self._end(_REASON_MISSING)
        found = torch.tensor(
            (outcome, vote.spans_groups, vote.tag, -vote.tag, *vote.hashes),
            dtype=torch.int32,
            device=self._device,
        )
        group = self._group()
        assert group is not None
        work = step_communicator(group, self._device).allreduce([found], self._options)
        if outcome:
            self._left.append((number, work, found))
            return False
        return self._wait(number, work, found, vote)

    def _wait(self, number: int, work: dist.Work, found: torch.Tensor, vote: Vote) -> bool:
        """Wait for an all-reduce; return whether ranks agree."""
        self.inside[VOTES] = number
        begin = time.monotonic()
        try:
            while True:
                try:
                    work.wait(_SEARCH_PERIOD)
                    break
                except RuntimeError:
                    # A completed work has failed: a peer has died, or the group's own timeout has
                    # passed.
                    if work.is_completed():
                        raise
                if self._can_end(number, vote.text, time.monotonic() - begin):
                    # The missing rank still writes to the memory of the all-reduce when it comes.
                    self._left.append((number, work, found))
                    return False
        finally:
            self.inside.pop(VOTES, None)
        outcome, self.spans_groups, high, low, *hashes = found.tolist()
        if vote.text:
            self.is_content_equal = _are_equal(hashes)
        if high != -low:
            self._end(_REASON_ORDER)
        elif outcome == _ENDS:
            # A rank has promised to end this vote to a peer that missed the rank.
            self._end(_REASON_MISSING)
        return not outcome and self.is_content_equal and not self.reason

    def _call_peers(self, number: int, own: Vote) -> bool:
        """Call peers until all have cast the vote of a number; return whether ranks agree."""
        group = self._group()
        if group is None or not self.calls_peers:
            return True
        votes = {self._rank: own}
        missing = self._peers
        self.inside[VOTES] = number
        begin = time.monotonic()
        try:
            while missing:
                replies = PeerRpc.for_group(group).call(
                    self._topic, {"vote": number}, missing, _REPLY_TIMEOUT_S
                )
                votes |= {rank: Vote(**header) for rank, (header, _) in replies.items() if header}
                missing = [rank for rank in self._peers if rank not in votes]
                if missing and self._can_end(
                    number,
                    own.text,
                    time.monotonic() - begin,
                    [dist.get_global_rank(group, rank) for rank in missing],
                ):
                    return False
        except PeerError as error:
            # The error ends with its remedy, and a reason is a clause of other messages.
            _log.warning("%s", error)
            self._end(f"not all of rank {name_group_ranks(group, missing)} replied in a vote")
            return False
        finally:
            self.inside.pop(VOTES, None)
            # A rank that runs ahead has voted on another step, and continues with it.
            self.has_peers_ahead = any(not (vote.text or vote.outcome) for vote in votes.values())
        return self._judge(group, votes)

    def _judge(self, group: dist.ProcessGroup, votes: Mapping[int, Vote]) -> bool:
        self.spans_groups = any(vote.spans_groups for vote in votes.values())
        self.is_content_equal = _are_equal(
            [max(found) for found in zip(*(vote.hashes for vote in votes.values()), strict=True)]
        )
        outcome = max(vote.outcome for vote in votes.values())
        if outcome == _ENDS:
            self._end(_REASON_MISSING)
        elif len({vote.tag for vote in votes.values()}) > 1:
            ranks: dict[str, list[int]] = {}
            for rank, vote in sorted(votes.items()):
                text = vote.text or "another optimizer"
                ranks.setdefault(text, []).append(rank)
            parts = " but ".join(
                f"{text} on rank {name_group_ranks(group, found)}" for text, found in ranks.items()
            )
            self._end(
                f"ranks step different optimizers, as scripts that shard the work themselves do: {parts}"
            )
        return not outcome and self.is_content_equal and not self.reason

    # ---------------------------------------------------------------- ranks that wait for each other

    def _can_end(
        self, number: int, text: str, waited_s: float, missing: Sequence[int] = ()
    ) -> bool:
        """Return whether a vote ends without a missing rank, which has promised to end it as well.

        Args:
            number: The number of the vote.
            text: The description of an optimizer at its first step. The process group's own timeout
                limits other votes.
            waited_s: The time that this rank has waited, in seconds.
            missing: The missing global ranks. Default: an all-reduce does not show them.
        """
        is_late = bool(text) and waited_s > self._timeout_s
        if text and waited_s > WARNING_DELAY_S and self._warned_vote != number:
            self._warned_vote = number
            group = self._group()
            hosts = {} if group is None else known_hosts(group)
            late = describe_missing("it", WARNING_DELAY_S, missing, hosts)
            _log.warning("%s", _WARNING_WAITING.format(text, self._timeout_s, late, _REMEDY))
        if not (is_late or self._leads_to(VOTES, number, [dist.get_rank()])):
            return False
        return self._promises_end(number)

    def _leads_to(self, name: str, number: int, path: Sequence[int]) -> bool:
        """Return whether a chain of waiting ranks leads to the first rank of a path.

        Args:
            name: The name of the operation of this rank with which the chain begins.
            number: The number of that operation.
            path: The ranks of the chain before it, and this rank.
        """
        group = self._group()
        if group is None or not self.calls_peers:
            return False
        question = {"name": name, "number": number, "path": list(path)}
        try:
            replies = PeerRpc.for_group(group).call(
                self._topic, question, timeout_s=_REPLY_TIMEOUT_S
            )
        except PeerError:
            # A rank that does not reply proves nothing.
            return False
        return any(header["is closed"] for header, _ in replies.values())

    def _promises_end(self, number: int) -> bool:
        """Have missing ranks end the votes in this one; return whether a rank has promised it."""
        group = self._group()
        if group is None:
            return False
        try:
            replies = PeerRpc.for_group(group).call(
                self._topic, {"end": number}, timeout_s=_REPLY_TIMEOUT_S
            )
        except PeerError:
            return False
        if not any(header["is promised"] for header, _ in replies.values()):
            return False
        self._end(_REASON_MISSING)
        return True

    # ---------------------------------------------------------------- replies to peers

    def _reply(self, question: Mapping[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        if "vote" in question:
            return self._reply_vote(question["vote"]), []
        if "end" in question:
            with self._changed:
                is_promised = self.reached[VOTES] < question["end"]
                if is_promised:
                    self._ended_vote = max(self._ended_vote, question["end"])
                    self._changed.notify_all()
            return {"is promised": is_promised}, []
        return {
            "is closed": self._closes(question["name"], question["number"], question["path"])
        }, []

    def _reply_vote(self, number: int) -> dict[str, Any]:
        """Return this rank's vote of a number; {} if it casts none in the caller's period."""
        with self._changed:
            is_known = self._changed.wait_for(
                lambda: self.reason or max(self.reached[VOTES], self._ended_vote) >= number,
                _SEARCH_PERIOD_S,
            )
            if number in self._votes:
                return asdict(self._votes[number])
            # This rank has ended the votes, or promised to, or the vote is so old that ranks are
            # far apart. A peer that has left the vote in which this rank ended them would wait
            # forever without this reply.
            return asdict(Vote(0, outcome=_ENDS)) if is_known else {}

    def _closes(self, name: str, number: int, path: Sequence[int]) -> bool:
        """Return whether this rank lacks an operation, and waits for the first rank of the path."""
        rank = dist.get_rank()
        if self.reached.get(name, 0) >= number:
            return False
        if rank in path:
            # Ranks of a chain that leads elsewhere find that themselves.
            return rank == path[0]
        chain = [*path, rank]
        waits = [
            (votes, *operation)
            for _, votes in group_values(StepVotes)
            for operation in [*votes.inside.items()]
        ]
        return any(
            votes._leads_to(own_name, own_number, chain) for votes, own_name, own_number in waits
        )
