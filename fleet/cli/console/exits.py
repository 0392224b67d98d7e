"""Exit statuses of the command `fleet`."""

DONE = 0
FAILED = 1
MISUSED = 2  # a command line
CONFIGURATION_REFUSED = 3  # a configuration, or another file that was to be read
HUNG = 4  # a worker's engine made no progress; whoever supervises the worker starts another
REPLACED = 5  # another process has a worker's id; whoever supervises the worker starts another
