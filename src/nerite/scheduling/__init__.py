"""Pure deciders for batching, queues, sequences, rate limits and load shedding: events and times in, decisions out.

This package uses no sockets, threads, clocks or models. Times are nanoseconds of any monotonic clock that the caller
uses consistently.
"""
