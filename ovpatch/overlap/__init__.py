"""What features share at run time.

The packages, from the lowest: ``comm``; ``tensors``, ``symm_mem`` and ``autotune``; ``data_parallel`` and ``peer_rpc``;
``copy_engine``; ``pipelining``. They know nothing of patches and plugins, and need torch only.
"""
