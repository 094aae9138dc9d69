"""Connectors: moving chunks between stages, one contract for in-process, shared memory, CUDA IPC and RDMA."""
