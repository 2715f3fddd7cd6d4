"""What the server says about itself: statistics, metrics, traces, logs."""
