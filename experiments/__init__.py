"""One script per figure."""
