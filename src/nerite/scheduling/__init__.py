"""Pure deciders: which requests run together, and when. They are told events and the time, and answer decisions.

No sockets, threads, clocks or models in here; times are nanoseconds on whatever clock the caller uses throughout.
"""
