"""What features share at run time: agreement between ranks, gradient ledger, flat buckets, ballots, labels.

Nothing here knows of patches or plugins; it needs torch only.
"""
