"""Kinds of kernels and copies, by the names that they have in traces of torch, NCCL and CUPTI."""

from __future__ import annotations

import re

import pytest

from ovpatch.insight.timeline.trace import (
    DeviceTimeKind,
    TraceEvent,
    classify_event,
    name_collective,
    name_cpu_collective,
)
from tests.insight.traces import ALL_REDUCE, GEMM


def kernel(name, category="kernel", **args):
    return TraceEvent(name, category, 0, 7, 0, 1, args)


COMMUNICATION = [
    (ALL_REDUCE, "nccl all_reduce"),
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl all_gather"),
    (
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "nccl reduce_scatter",
    ),
    ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "nccl send/recv"),
    ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl broadcast"),
    ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "nccl other"),
    (
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
        "nccl all_reduce",
    ),
    (
        "ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs4K)",
        "nccl all_reduce",
    ),
    (
        "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(...)",
        "symmetric memory all_reduce",
    ),
    (
        "void (anonymous namespace)::two_shot_all_reduce_kernel<float, 16, 8>(...)",
        "symmetric memory all_reduce",
    ),
    (
        "void (anonymous namespace)::one_shot_all_reduce_kernel<float, 16, 8>(...)",
        "symmetric memory all_reduce",
    ),
    (
        "void (anonymous namespace)::multimem_all_gather_kernel<16>(...)",
        "symmetric memory all_gather",
    ),
    (
        "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)",
        "symmetric memory barrier",
    ),
    (
        "void barrier_on_stream_kernel_threadgroup<(threadgroup_t)1>(int, int)",
        "symmetric memory barrier",
    ),
    (
        "void alltoall_on_stream_kernel<signed char>(int, signed char*)",
        "symmetric memory all_to_all",
    ),
    (
        "void fcollect_on_stream_kernel<signed char>(int, signed char*)",
        "symmetric memory all_gather",
    ),
    ("nvshmemi_proxy_rma_signal_entrypoint_blocking(rma_batch)", "symmetric memory signal"),
    (
        "void c10d::intra_node_comm::oneShotAllReduceKernel<8u, true>(...)",
        "symmetric memory all_reduce",
    ),
    (
        "c10d::symmetric_memory::put_signal_kernel(unsigned int**, int, int)",
        "symmetric memory signal",
    ),
    ("symm_all_to_all_kernel", "symmetric memory all_to_all"),
]


@pytest.mark.parametrize(("name", "collective"), COMMUNICATION)
def test_kernels_that_communicate(name, collective):
    assert classify_event(kernel(name)) is DeviceTimeKind.COMMUNICATION
    assert name_collective(kernel(name)) == collective


@pytest.mark.parametrize(
    "name",
    [
        GEMM,
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)",
        "triton_poi_fused_add_0",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(...)",
        "void at::native::_scatter_gather_elementwise_kernel<128, 8>(int)",
        "grid_barrier_kernel_of_somebody",
    ],
)
def test_kernels_that_compute(name):
    assert classify_event(kernel(name)) is DeviceTimeKind.COMPUTE


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy PtoP (Device -> Device)", DeviceTimeKind.COMMUNICATION),
        ("Memcpy DtoD (Device -> Device)", DeviceTimeKind.COMPUTE),
        ("Memcpy HtoD (Pinned -> Device)", DeviceTimeKind.COPY),
        ("Memcpy HtoD (Pageable -> Device)", DeviceTimeKind.COPY),
        ("Memcpy DtoH (Device -> Pinned)", DeviceTimeKind.COPY),
    ],
)
def test_copies(name, kind):
    assert classify_event(kernel(name, "gpu_memcpy")) is kind


def test_memsets_compute():
    assert classify_event(kernel("Memset (Device)", "gpu_memset")) is DeviceTimeKind.COMPUTE


def test_a_peer_copy_is_called_that():
    assert name_collective(kernel("Memcpy PtoP (Device -> Device)", "gpu_memcpy")) == "peer copy"


@pytest.mark.parametrize(
    ("said", "collective"),
    [
        ("allreduce", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("allreduce_coalesced", "all_reduce"),
        ("all_to_allv", "all_to_all"),
        ("", "other"),
    ],
)
def test_what_torch_says_about_a_kernel_counts_more_than_its_name(said, collective):
    event = kernel(
        "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", **{"Collective name": said}
    )
    assert name_collective(event) == f"nccl {collective}"


def test_a_pattern_adds_kernels():
    event = kernel("void deep_ep::internode::dispatch<4>(int)")
    assert classify_event(event) is DeviceTimeKind.COMPUTE
    assert classify_event(event, re.compile("deep_ep::")) is DeviceTimeKind.COMMUNICATION
    assert name_collective(event) == "void deep_ep::internode::dispatch"


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("gloo:all_reduce", "gloo all_reduce"),
        ("gloo:reduce_scatter", "gloo reduce_scatter"),
        ("gloo:send", "gloo send/recv"),
        ("mpi:broadcast", "mpi broadcast"),
        # The launch on the host: the kernel counts.
        ("nccl:all_reduce", ""),
        ("DistributedDataParallel.forward", ""),
    ],
)
def test_collectives_on_cpu(name, collective):
    assert name_cpu_collective(kernel(name, "user_annotation")) == collective
    assert name_cpu_collective(kernel(name, "cpu_op")) == ""
