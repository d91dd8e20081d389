"""Feature ``megatron``: Megatron-Core's linears with hidden collectives, and no silent faults of its gradients."""
