"""The ``torch.compile`` path: the same policies where a checkpoint is part of a compiled graph.

``traced`` is what Dynamo traces in place of the eager runtime, ``trace`` what is known while it does, ``marks`` what
the partitioner is told.
"""
