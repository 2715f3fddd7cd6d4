"""A cache in Redis, which several servers may have in common. Needs the extra ``nerite[redis]``."""
