"""What features share at run time.

Agreement between ranks, questions to other ranks, gradient ledger, flat buckets, ballots, labels. Nothing here knows of
patches or plugins; it needs torch only.
"""
