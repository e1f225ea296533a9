// Every row-wise operation of the CUDA backend against the CPU's on the same inputs, and the device
// memory against the device's own figures. One line a check; the exit status is 1 if any failed.
// "speed" as the argument measures instead.
//
// Build, from the repository root, with the library already built in BUILD (cmake -S native
// -B BUILD -DTINYLOOP_PYTHON=OFF && cmake --build BUILD):
//   cd tests/native/cpp/cuda && nvcc -std=c++20 -O2 -arch=sm_90a -x cu -I ../../../../native/src
//     -I ../../../../native/include -I .. -I . rows_test.cu *_checks.cc row_speed.cc
//     ../../../../native/src/cuda/{norms,gates,moves,normal,heads,hidden,embed,weight}.cu
//     ../../../../native/src/cuda/{address_space,current_device,device_memory,pinned}.cc
//     -x none BUILD/libtinyloop.a -lpthread -o rows_test
#include "device_data.h"

int main(int argc, char** argv) {
  using namespace tinyloop;
  using namespace tinyloop::cuda;
  const auto half = make_cpu_backend("", 4, false), full = make_cpu_backend("", 4, true);
  Bench bench;
  bench.half = half.get();
  bench.full = full.get();
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0), "ask for the device");
  check(cudaStreamCreateWithFlags(&bench.stream, cudaStreamNonBlocking), "create a stream");
  std::printf("%s, against %s\n", device.name, half->identity().c_str());
  if (argc > 1 && std::string(argv[1]) == "speed") {
    measure(bench);
    return 0;
  }
  check_rows(bench);
  check_moves(bench);
  check_heads(bench);
  check_hidden(bench);
  check_memory(bench);
  std::printf("%d failed\n", failures());
  return failures() == 0 ? 0 : 1;
}
