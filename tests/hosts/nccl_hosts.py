"""Trains four ranks over NCCL on two GPUs that NCCL takes for two hosts, so that its sockets connect them.

Prints the bytes of one step on the loopback interface, of all ranks together. Fails if a value differs from stock
PyTorch.
"""

import os

import torch
import torch.distributed as dist

from tests.hosts import test_cluster
from tests.hosts.test_shards import on_hosts
from tests.hosts.test_shards_on_streams import HOSTS, TRAINED, train
from tests.plugins.dist_optimizer.checks import all_cases
from tests.support.equality import compare

NAMED = {"shard_over": "host"}


def main() -> None:
    """Train and compare."""
    rank = int(os.environ["RANK"])
    # Ranks with the same name would use NVLink or shared memory, and could not share a GPU.
    os.environ |= {"NCCL_HOSTID": f"host{HOSTS[rank]}", "NCCL_SOCKET_IFNAME": "lo"}
    gpu = torch.device("cuda", rank % 2)
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", device_id=gpu)
    for name, case in on_hosts(HOSTS, all_cases, train, TRAINED, NAMED).items():
        compared = compare(case["stock"], case["patched"], reordered=case["reordered"])
        compared.assert_equal()
        assert case["counters"]["steps"] > 0, name
    options = {"dist_optimizer": NAMED | {"min_param_numel": 8}}
    features = ("ddp", "dist_optimizer")
    sent, sharded, *_ = on_hosts(
        HOSTS, test_cluster.train_in_group, features, options, 5, "cuda", "lo"
    )
    assert sharded > 0, "no step was sharded"
    dist.destroy_process_group()
    if rank == 0:
        print(f"bytes {sent:.0f}")


if __name__ == "__main__":
    main()
