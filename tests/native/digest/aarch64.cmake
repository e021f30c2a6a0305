# Toolchain: GCC for 64-bit ARM on another Linux machine.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
find_program(
  CMAKE_CXX_COMPILER
  NAMES aarch64-linux-gnu-g++ aarch64-linux-gnu-g++-15 aarch64-linux-gnu-g++-14
        aarch64-linux-gnu-g++-13 aarch64-linux-gnu-g++-12 aarch64-linux-gnu-g++-11 REQUIRED)
