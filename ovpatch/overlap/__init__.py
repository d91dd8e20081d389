"""What features share at run time.

Agreement and votes between ranks, questions to other ranks, gradient ledger, buckets, parts of gradients, placeholders
and pending parameters, ballots, labels. Nothing here knows of patches or plugins; it needs torch only.
"""
