"""Base of the backends whose framework computes outputs from one array for each input.

A framework subclasses ``ArrayModel`` (``backend``): it opens a file, lists the inputs and outputs, and runs a batch.
Everything else is shared. ``graph`` completes a configuration from those inputs and outputs, and checks one against
them. ``calls`` memoizes what follows from a request's header, ``batches`` joins requests into input arrays and cuts
output arrays into responses, and ``ArrayInstance`` executes one batch with both.
"""
