// The .tloop file, version 1: the only parser of foreign bytes in the engine.
//
// Little-endian, fixed widths. 64 bytes of preamble, a header of four sections (descriptor,
// metadata, tensor table, tokenizer entry), then data blobs that start at multiples of 256. Nothing
// in the file is trusted: every length, product and offset is checked against the file's size
// before it is used, and every blob has a CRC.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tinyloop/descriptor.h"

namespace tinyloop {

enum class TensorKind : uint8_t { kF32 = 1, kF16 = 2, kQ4 = 4, kQ8 = 8 };

// One row of the tensor table. A vector has cols = 0.
struct TensorEntry {
  std::string name;
  TensorKind kind = TensorKind::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t group = 0;  // 32, 64 or 128 for kQ4 and kQ8, else 0
  const uint8_t* data = nullptr;
  size_t bytes = 0;
  uint32_t crc = 0;

  int64_t groups() const { return (cols + group - 1) / group; }
};

// A path as messages show it: bytes that are no text become question marks.
std::string display(const std::string& path);

// A read-only mapping of a whole file. The file must not shrink while it is mapped.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);  // throws LoadError
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  const uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  const uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

// The parsed header. Entries point into the bytes given to parse_file(), which must outlive it.
struct ModelFile {
  Descriptor descriptor;
  std::map<std::string, std::string> metadata;
  std::vector<TensorEntry> tensors;
  std::string_view tokenizer;

  // Throws LoadError if the table has no tensor of that name and shape (cols 0: a vector).
  const TensorEntry& require(const std::string& name, int64_t rows, int64_t cols) const;
};

// Parses and checks everything but the CRCs of the tensors' data. Throws LoadError naming the
// field.
ModelFile parse_file(const uint8_t* data, size_t bytes);

// Throws LoadError if the tensor's data does not have the CRC of the table.
void check_crc(const TensorEntry& entry);

}  // namespace tinyloop
