"""The ops: their arguments, the Problems they describe, their gradients, and the recording of a model's calls."""
