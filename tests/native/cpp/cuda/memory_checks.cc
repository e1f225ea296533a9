// The device's memory against what the device itself says, and copies through page-locked memory.
#include <chrono>
#include <random>
#include <thread>

#include "cuda/device_memory.h"
#include "cuda/pinned.h"
#include "device_data.h"

namespace tinyloop::cuda {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
// What the driver may take for page tables and its own books while we map memory.
constexpr size_t kDriverSlack = 64 * kMiB;

size_t free_bytes() {
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "ask for free memory");
  return free;
}

bool agrees(const DeviceMemory& memory, size_t free_before) {
  const size_t taken = free_before - std::min(free_before, free_bytes());
  return taken <= memory.mapped_bytes() + kDriverSlack &&
         taken + kDriverSlack >= memory.mapped_bytes();
}

void check_blocks() {
  const size_t before = free_bytes();
  {
    DeviceMemory memory(0);
    report(memory.maps_chunks(), "this device maps chunks: " + memory.describe());
    std::vector<std::pair<uint8_t*, size_t>> blocks;
    size_t sum = 0;
    bool good = true;
    for (int i = 0; i < 400; ++i) {
      const size_t bytes = i % 40 == 0 ? 100 * kMiB + 3 : 1000 + static_cast<size_t>(i) * 777;
      blocks.emplace_back(static_cast<uint8_t*>(memory.allocate(bytes)), bytes);
      good &= blocks.back().first != nullptr &&
              reinterpret_cast<uintptr_t>(blocks.back().first) % 256 == 0;
      sum += (bytes + 255) / 256 * 256;
      check(cudaMemset(blocks.back().first, i % 251, bytes), "fill a block");
    }
    report(good, "400 blocks, aligned");
    report(memory.live_bytes() == sum && memory.mapped_bytes() < sum + 2 * kMiB,
           "side by side: " + std::to_string(memory.mapped_bytes()) + " mapped for " +
               std::to_string(sum));
    report(agrees(memory, before), "the device says the same");
    for (int i = 0; i < 400; ++i) {
      uint8_t ends[2];
      const auto& [data, bytes] = blocks[static_cast<size_t>(i)];
      check(cudaMemcpy(&ends[0], data, 1, cudaMemcpyDeviceToHost), "read");
      check(cudaMemcpy(&ends[1], data + bytes - 1, 1, cudaMemcpyDeviceToHost), "read");
      good &= ends[0] == i % 251 && ends[1] == i % 251;
    }
    report(good, "no block is in another");
    for (size_t i = 0; i < blocks.size(); i += 2) {
      memory.release(blocks[i].first, blocks[i].second);
      sum -= (blocks[i].second + 255) / 256 * 256;
    }
    report(memory.live_bytes() == sum && agrees(memory, before), "half of them released");
    report(memory.allocate(SIZE_MAX) == nullptr && memory.allocate(SIZE_MAX / 2) == nullptr &&
               memory.allocate(size_t{1} << 40) == nullptr &&
               memory.allocate(free_bytes() + 4 * kMiB) == nullptr &&
               cudaPeekAtLastError() == cudaSuccess && memory.live_bytes() == sum,
           "absurd sizes fail and leave nothing");
    memory.hold_chunks();
    const size_t mapped = memory.mapped_bytes();
    std::thread other([&] {
      for (size_t i = 1; i < blocks.size(); i += 2) {
        memory.release(blocks[i].first, blocks[i].second);
      }
    });
    other.join();
    report(memory.live_bytes() == 0 && memory.mapped_bytes() == mapped, "held while it is said so");
    memory.let_chunks_go();
    report(memory.mapped_bytes() == 0 && agrees(memory, before), "all released from a thread");
    report(memory.allocate(50 * kMiB) != nullptr, "and again");
  }
  report(before - std::min(before, free_bytes()) <= kDriverSlack, "all is back at the end");
}

void check_big_block() {
  DeviceMemory memory(0);
  const size_t bytes = free_bytes() / 2;
  const auto start = std::chrono::steady_clock::now();
  void* data = memory.allocate(bytes);
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  report(data != nullptr,
         "a block of " + std::to_string(bytes / kMiB) + " MiB in " + number(took.count()) + " ms");
  const auto small_start = std::chrono::steady_clock::now();
  std::vector<void*> blocks;
  for (int i = 0; i < 512; ++i) blocks.push_back(memory.allocate(2 * kMiB));
  const std::chrono::duration<double, std::milli> each =
      std::chrono::steady_clock::now() - small_start;
  report(blocks.back() != nullptr, "512 blocks of 2 MiB in " + number(each.count()) + " ms");
  memory.release(data, bytes);
}

void check_ring(const Bench& bench) {
  PinnedRing ring(0, bench.stream);
  std::mt19937 random(5);
  Bytes expected(size_t{40} * kMiB);
  const OnDevice<uint8_t> device(expected);
  bool good = true;
  for (int i = 0; i < 3000; ++i) {
    const size_t bytes = i % 500 == 7 ? 9 * kMiB + 5 : 1 + random() % 20000;
    const size_t at = random() % (expected.size() - bytes);
    Bytes source(bytes);
    for (size_t k = 0; k < bytes; k += 97) source[k] = static_cast<uint8_t>(random());
    ring.write(device.get() + at, source.data(), bytes);
    std::copy(source.begin(), source.end(), expected.begin() + static_cast<int64_t>(at));
    std::fill(source.begin(), source.end(), 0xEE);
    if (i % 100 == 0) {
      Bytes back(bytes);
      ring.read(back.data(), device.get() + at, bytes);
      good &= std::equal(back.begin(), back.end(), expected.begin() + static_cast<int64_t>(at));
    }
  }
  Bytes all(expected.size());
  ring.read(all.data(), device.get(), all.size());
  report(good && all == expected, "3,000 writes and their reads through the ring");
}

}  // namespace

void check_memory(const Bench& bench) {
  check_blocks();
  check_big_block();
  check_ring(bench);
}

}  // namespace tinyloop::cuda
