"""What can go wrong in a replay."""


class ReplayError(RuntimeError):
    """A block can't be recomputed so that its gradients would be right; the message names it and says why."""
