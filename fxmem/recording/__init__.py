"""Running a model on fake tensors and writing down what it allocates.

``recorder`` is the dispatch mode through which each ATen call goes. ``compute`` runs the call
(for real, from ``memo``, or on fake tensors with CUDA's ``shapes``), ``ledger`` knows which
storages live, ``plain`` what autograd does to plain tensors but not to fake ones, ``sourceline``
and ``modulepath`` where in the user's code it happens. ``notes`` makes the tape of it, ``graph``
the ``torch.fx`` graph.
"""
