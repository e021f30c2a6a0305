"""Where compute happens: CPU, an emulated device, CUDA; copies to it and from it."""
