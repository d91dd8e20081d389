"""Feature ``pipeline``: zero-bubble schedules behind ``torch.distributed.pipelining``."""
