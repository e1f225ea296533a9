// Every row-wise operation of the CUDA backend against the CPU's on the same inputs, and the device
// memory against the device's own figures. One line a check; the exit status is 1 if any failed.
// "rows" as the argument leaves the device's memory out, "speed" measures instead. Build, here,
// with the library already built in BUILD (cmake -S native -B BUILD -DTINYLOOP_PYTHON=OFF && cmake
// --build BUILD):
//
//   S=../../../../native/src
//   nvcc -std=c++20 -O2 -gencode=arch=compute_90a,code=sm_90a -I $S -I $S/../include -o rows_test
//     rows_test.cu *_checks.cc row_speed.cc $S/cuda/{norms,norms_few,norms_many}.cu
//     $S/cuda/{gates,moves,normal,heads,heads_whole,hidden,embed,weight}.cu
//     $S/cuda/{address_space,current_device,device_memory,pinned}.cc BUILD/libtinyloop.a -lpthread
#include <cstdio>

#include "bench.h"
#include "cuda/check.h"

namespace tinyloop::cuda {
namespace {
int failed = 0;
}

void report(bool good, const std::string& text) {
  if (!good) ++failed;
  std::printf("%s %s\n", good ? "ok    " : "FAILED", text.c_str());
  std::fflush(stdout);
}
int failures() { return failed; }

}  // namespace tinyloop::cuda

int main(int argc, char** argv) {
  using namespace tinyloop;
  using namespace tinyloop::cuda;
  const auto half = make_cpu_backend("", 4, NumericMode::kFp16);
  const auto full = make_cpu_backend("", 4, NumericMode::kFp32);
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
  // Under a memory checker the device's own figures are the checker's too.
  if (argc <= 1 || std::string(argv[1]) != "rows") check_memory(bench);
  std::printf("%d failed\n", failures());
  return failures() == 0 ? 0 : 1;
}
