// The checks of the device's row operations, each list in a file of its own, and what they run on.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "backend.h"

namespace tinyloop::cuda {

struct Bench {
  cudaStream_t stream = nullptr;
  Backend* half = nullptr;  // the CPU's
  Backend* full = nullptr;
  Backend& cpu(bool fp32) const { return fp32 ? *full : *half; }
};

void check_rows(const Bench& bench);
void check_moves(const Bench& bench);
void check_heads(const Bench& bench);
void check_hidden(const Bench& bench);
void check_memory(const Bench& bench);
void measure(const Bench& bench);

// One line; counts those that failed.
void report(bool good, const std::string& text);
int failures();

}  // namespace tinyloop::cuda
