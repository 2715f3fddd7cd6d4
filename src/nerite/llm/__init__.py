"""Language models: engines that generate text token by token for many requests at once.

Path of a request: ``request`` parses its tensors and sampling parameters; the ``engine`` adds it to its running batch;
``streaming`` turns the output of each step into responses. Tensors and error texts are those of Triton's vLLM backend
(``backend``). Each engine has a module or package of its own.
"""
