"""A load generator for servers that speak KServe v2 or OpenAI's API.

    cli/bench -> session -> fleet ==pipe==> generator/process (one or several): slots, and a loop that gives them work
                    |                           records, several times a second
                    +-> measurement (windows, stability) -> figures -> report/

What is decided (``arrivals``, ``measurement``, ``figures``, ``objectives``, ``scripts``) is plain objects that are told
events and the time. Requests are bytes before the load begins (``forms``). A generator does nothing but send them, look
at where answers end, and note the time; whatever costs more is done by the process that reads its records.
"""
