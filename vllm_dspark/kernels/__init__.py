"""Device kernels and their torch twins; Triton is imported only by the modules that need it."""
