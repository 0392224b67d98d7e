"""Exit statuses of the command `fleet`."""

DONE = 0
FAILED = 1
MISUSED = 2  # the command line is wrong
CONFIGURATION_REFUSED = 3  # a configuration or another input file was refused
HUNG = 4  # the engine of a worker made no progress; its supervisor starts another worker
REPLACED = 5  # another process has registered with the worker's id; the supervisor starts another worker
