"""Feature ``megatron``: Megatron-Core's linears hide their collectives, and its gradients have no silent faults."""
