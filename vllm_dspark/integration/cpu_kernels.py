def register_native_kernels(): pass
