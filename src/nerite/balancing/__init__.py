"""Which server of a pool gets a request. Pure deciders: given events and the time, no I/O, no clock."""
