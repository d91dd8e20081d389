"""Feature ``ddp``: our gradient reducer inside the stock ``DistributedDataParallel`` class."""
