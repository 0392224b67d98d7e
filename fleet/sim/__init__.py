"""The discrete-event world around the machines that run in production: the same router, on simulated engines and links."""
