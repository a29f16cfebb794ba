"""What every CUDA C++ op shares: compiling, loading and launching its `kernel.cu`, and running it on the CPU."""
