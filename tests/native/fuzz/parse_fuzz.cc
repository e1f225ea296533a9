// Fuzz target: whatever the bytes are, the parser of model files either reads them or throws
// LoadError. Any other exception, a sanitizer's report or a hang is a finding.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "crc32.h"
#include "format.h"
#include "tinyloop/errors.h"

// Given by libFuzzer, or by driver.cc where there is no libFuzzer.
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

// Where the preamble's fields lie; format.h describes the file.
constexpr size_t kPreamble = 64, kAlign = 256, kTokenizerEntry = 20;
constexpr size_t kHeaderCrc = 12, kHeaderBytes = 16, kDataOffset = 24, kFileBytes = 32;

template <typename T>
T get(const uint8_t* data, size_t at) {
  T value;
  std::memcpy(&value, data + at, sizeof(T));
  return value;
}

template <typename T>
void put(uint8_t* data, size_t at, T value) {
  std::memcpy(data + at, &value, sizeof(T));
}

// The tokenizer's CRC, if the header's last entry points at bytes of the file.
void repair_tokenizer(uint8_t* data, size_t size, size_t header_bytes) {
  if (header_bytes < kTokenizerEntry) return;
  const size_t entry = kPreamble + header_bytes - kTokenizerEntry;
  const auto offset = get<uint64_t>(data, entry), bytes = get<uint64_t>(data, entry + 8);
  if (offset > size || bytes > size - offset) return;
  put(data, entry + 16, tinyloop::crc32(data + offset, bytes));
}

// Makes the preamble tell the truth about the header that follows it: without this, no mutation of
// the header would get past its CRC.
void repair(uint8_t* data, size_t size, size_t header_bytes) {
  repair_tokenizer(data, size, header_bytes);
  put<uint64_t>(data, kHeaderBytes, header_bytes);
  put<uint64_t>(data, kDataOffset, (kPreamble + header_bytes + kAlign - 1) / kAlign * kAlign);
  put<uint64_t>(data, kFileBytes, size);
  put(data, kHeaderCrc, tinyloop::crc32(data + kPreamble, header_bytes));
}

// Mutates the header alone and moves the data behind it to where its new length wants them.
size_t mutate_header(uint8_t* data, size_t size, size_t max_size, size_t header_bytes) {
  const size_t begin = std::min(size, (kPreamble + header_bytes + kAlign - 1) / kAlign * kAlign);
  const std::vector<uint8_t> blobs(data + begin, data + size);
  std::vector<uint8_t> header(data + kPreamble, data + kPreamble + header_bytes);
  const size_t room = max_size - kPreamble;
  header.resize(room);
  header_bytes = LLVMFuzzerMutate(header.data(), header_bytes, room);
  std::memcpy(data + kPreamble, header.data(), header_bytes);
  const size_t end = kPreamble + header_bytes;
  const size_t aligned = std::min(max_size, (end + kAlign - 1) / kAlign * kAlign);
  std::memset(data + end, 0, aligned - end);
  const size_t kept = std::min(blobs.size(), max_size - aligned);
  std::copy_n(blobs.begin(), kept, data + aligned);
  repair(data, aligned + kept, header_bytes);
  return aligned + kept;
}

}  // namespace

// Three of four mutations are of a header under a right CRC; the rest are of the whole file, half
// of them under a CRC that was repaired afterwards.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  if (size < kPreamble || max_size < size) return LLVMFuzzerMutate(data, size, max_size);
  const uint64_t header_bytes =
      std::min<uint64_t>(get<uint64_t>(data, kHeaderBytes), size - kPreamble);
  if (seed % 4 != 0) return mutate_header(data, size, max_size, header_bytes);
  size = LLVMFuzzerMutate(data, size, max_size);
  if (seed % 8 == 0 && size >= kPreamble) {
    repair(data, size, std::min<uint64_t>(get<uint64_t>(data, kHeaderBytes), size - kPreamble));
  }
  return size;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const tinyloop::ModelFile file = tinyloop::parse_file(data, size);
    for (const tinyloop::TensorEntry& tensor : file.tensors) tinyloop::check_crc(tensor);
    file.require("embed", file.descriptor.vocab_size, file.descriptor.hidden_size);
  } catch (const tinyloop::LoadError&) {
    // The one answer to a file that cannot be used.
  }
  return 0;
}
