"""The cluster file: pools of servers, and the router in front of them, as typed data."""
