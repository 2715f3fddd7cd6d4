"""Statistics that compare two arms of a route at any time without inflating false alarms. Pure."""
