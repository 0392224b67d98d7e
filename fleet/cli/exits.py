"""Exit statuses of the command `fleet`."""

DONE = 0
FAILED = 1
MISUSED = 2  # a command line
REFUSED = 3  # a configuration, or another file that was to be read
REPLACED = 5  # of a worker: another process has its id
