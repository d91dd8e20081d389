"""What features share at run time.

From the lowest: ``comm``, ``autograd`` and ``module_blocks``; ``tensors`` and ``kernels``; ``data_parallel``,
``peer_rpc`` and ``tensor_parallel``; ``pipelining``. They know nothing of patches and plugins, and need torch only.
"""
