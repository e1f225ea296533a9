// A small coverage-guided fuzzer with libFuzzer's interface, for machines without clang.
//
//   parse_fuzz SECONDS FINDING SEED_FOLDER...
//
// The target is built with GCC's -fsanitize-coverage=trace-pc, this file is not. An input that ends
// the process (a sanitizer's report, an exception that nobody takes, a hang) is written to FINDING.
#include <sanitizer/common_interface_defs.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed);

namespace {

using Input = std::vector<uint8_t>;

constexpr size_t kMaxSize = 12288;
constexpr unsigned kHangSeconds = 10;
constexpr uint64_t kRunsBetweenLooks = 256;  // at the clock

// How often each place of the target ran in one execution; places are hashed into it.
uint8_t hits[1 << 16];
// For each place, the powers of two of counts that were seen so far, one bit each.
uint8_t known[1 << 16];

std::mt19937_64 random_bits(1);  // one fixed course: a finding comes again
std::vector<Input> corpus;
Input current;
const char* finding_path = nullptr;

size_t below(size_t n) { return static_cast<size_t>(random_bits() % n); }

void save_current() {
  std::ofstream(finding_path, std::ios::binary)
      .write(reinterpret_cast<const char*>(current.data()),
             static_cast<std::streamsize>(current.size()));
  std::fprintf(stderr, "the input is in %s\n", finding_path);
}

void on_signal(int signal) {
  std::fprintf(stderr, "%s\n", signal == SIGALRM ? "hang: an input takes too long" : "abort");
  save_current();
  ::_exit(1);
}

// Whether the execution just made reached a place, or a number of visits, that none did before.
bool take_new_coverage() {
  bool is_new = false;
  for (size_t i = 0; i < std::size(hits); i += sizeof(uint64_t)) {
    uint64_t eight;
    std::memcpy(&eight, hits + i, sizeof(eight));
    if (eight == 0) continue;
    for (size_t j = i; j < i + sizeof(eight); ++j) {
      if (hits[j] == 0) continue;
      const auto power = static_cast<uint8_t>(1u << (31 - __builtin_clz(hits[j])));
      is_new |= (known[j] & power) == 0;
      known[j] |= power;
    }
  }
  return is_new;
}

bool run(const Input& input) {
  std::memset(hits, 0, sizeof(hits));
  // In memory of exactly its size: a vector's spare capacity would hide a read past the end.
  const auto exact = std::make_unique<uint8_t[]>(input.size());
  std::copy(input.begin(), input.end(), exact.get());
  LLVMFuzzerTestOneInput(exact.get(), input.size());
  return take_new_coverage();
}

void write_integer(Input& bytes) {
  constexpr uint64_t kTelling[] = {0,        1,          2,          0x7F,      0x80,
                                   0xFF,     0x100,      0x7FFF,     0xFFFF,    0x7FFFFFFF,
                                   1u << 31, 0xFFFFFFFF, 1ull << 62, INT64_MAX, UINT64_MAX};
  const size_t width = std::min(size_t{1} << below(4), bytes.size());
  const uint64_t value = kTelling[below(std::size(kTelling))];
  std::memcpy(bytes.data() + below(bytes.size() - width + 1), &value, width);
}

void insert_piece(Input& bytes) {
  const Input& source = corpus[below(corpus.size())];
  if (source.empty()) return;
  const size_t from = below(source.size());
  const size_t length = 1 + below(std::min<size_t>(64, source.size() - from));
  const auto piece = source.begin() + static_cast<std::ptrdiff_t>(from);
  const auto at = bytes.begin() + static_cast<std::ptrdiff_t>(below(bytes.size() + 1));
  bytes.insert(at, piece, piece + static_cast<std::ptrdiff_t>(length));
}

void erase_piece(Input& bytes) {
  const size_t from = below(bytes.size());
  const size_t length = 1 + below(std::min<size_t>(64, bytes.size() - from));
  const auto at = bytes.begin() + static_cast<std::ptrdiff_t>(from);
  bytes.erase(at, at + static_cast<std::ptrdiff_t>(length));
}

void mutate_once(Input& bytes) {
  if (bytes.empty()) return insert_piece(bytes);
  switch (below(5)) {
    case 0:
      bytes[below(bytes.size())] ^= static_cast<uint8_t>(1u << below(8));
      return;
    case 1:
      bytes[below(bytes.size())] = static_cast<uint8_t>(below(256));
      return;
    case 2:
      return write_integer(bytes);
    case 3:
      return insert_piece(bytes);
    default:
      return erase_piece(bytes);
  }
}

void read_seeds(const std::string& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream in(entry.path(), std::ios::binary);
    current.assign(std::istreambuf_iterator<char>(in), {});
    current.resize(std::min(current.size(), kMaxSize));
    run(current);
    corpus.push_back(current);
  }
}

uint64_t fuzz_for(std::chrono::seconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  uint64_t runs = 0;
  for (;; ++runs) {
    if (runs % kRunsBetweenLooks == 0) {
      ::alarm(kHangSeconds);
      if (std::chrono::steady_clock::now() >= end) return runs;
    }
    current = corpus[below(corpus.size())];
    const size_t size = current.size();
    current.resize(kMaxSize);
    current.resize(LLVMFuzzerCustomMutator(current.data(), size, kMaxSize,
                                           static_cast<unsigned>(random_bits())));
    if (run(current)) corpus.push_back(current);
  }
}

}  // namespace

extern "C" void __sanitizer_cov_trace_pc() {
  const auto place = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  uint8_t& count = hits[(place ^ (place >> 16)) % std::size(hits)];
  if (count != UINT8_MAX) ++count;
}

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size) {
  Input bytes(data, data + size);
  for (size_t n = 1 + below(4); n > 0; --n) mutate_once(bytes);
  bytes.resize(std::min(bytes.size(), max_size));
  std::copy(bytes.begin(), bytes.end(), data);
  return bytes.size();
}

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: %s SECONDS FINDING SEED_FOLDER...\n", argv[0]);
    return 2;
  }
  finding_path = argv[2];
  __sanitizer_set_death_callback(save_current);
  std::signal(SIGABRT, on_signal);
  std::signal(SIGALRM, on_signal);
  for (int i = 3; i < argc; ++i) read_seeds(argv[i]);
  if (corpus.empty()) {
    std::fprintf(stderr, "the seed folders hold no file\n");
    return 2;
  }
  const uint64_t runs = fuzz_for(std::chrono::seconds(std::atoi(argv[1])));
  const auto places = std::count_if(known, known + std::size(known), [](uint8_t k) { return k; });
  std::printf("%llu executions, %zu inputs kept, %td places reached, no finding\n",
              static_cast<unsigned long long>(runs), corpus.size(), places);
  return 0;
}
