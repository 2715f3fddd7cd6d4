"""For frameworks that compute with one array an input: from a batch of requests to arrays, and back.

``ports`` is where a client's tensor and the model's meet, ``call`` what follows from a request's header, ``selection``
which outputs are wanted. An ``instance`` joins the requests of a batch (``feeds``), has a backend compute, and takes
what comes out apart (``replies``). ``ragged`` is for rows that differ in length.

``graph`` is what a model says of itself; with it ``completion`` fills a configuration in, and ``agreement`` checks one:
a tensor of it, ``comparison`` all of it. A ``face`` is a model that was found to agree, as its callers know it.
"""
