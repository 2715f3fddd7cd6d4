"""A fuzzer: inputs that are wrong in every way, at every place where the server reads what others wrote.

    surfaces    what is sent, where, and how often       mutators/   what is done to valid inputs
    inference, administration, configurations            valid inputs: tensors, everything else, files
    stored      those about what outlives a request      picking     those of a gateway to an endpoint picker
    batch_runs  batches that are run to their end, and the rows of the ledger
    lanes       how inputs are sent, and their ends      local       those that are read in this process
    subject     the server, with the models of models    canaries    requests whose answers are known
    symptoms    what shows that something is wrong       monitor     memory, descriptors, files
    runner      rounds, and who is to blame              shrinker    the least that still shows it
    case        inputs as text: corpus/ has those that once were findings

``make fuzz`` runs it for minutes, ``test_short_run.py`` for seconds with every run of the tests.
"""
