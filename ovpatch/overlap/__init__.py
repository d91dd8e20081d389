"""What features share at run time.

The packages, from the lowest: ``comm``; ``tensors`` and ``kernels``; ``data_parallel`` and ``peer_rpc``;
``tensor_parallel``. They know nothing of patches and plugins, and need torch only.
"""
