#include "format.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <optional>
#include <set>
#include <variant>

#include "crc32.h"
#include "kv.h"
#include "tinyloop/errors.h"

namespace tinyloop {

namespace {

constexpr char kMagic[9] = "TINYLOOP";
constexpr uint32_t kVersionOldest = 1;
constexpr uint32_t kVersionMax = 1;
constexpr size_t kPreamble = 64;
constexpr size_t kAlign = 256;
// Far above any model and far below an overflow: products of two dims fit 64 bits.
constexpr int64_t kMaxDim = int64_t{1} << 30;

[[noreturn]] void fail(const std::string& field, const std::string& found) {
  throw LoadError("cannot read the model file: " + field + ": " + found);
}

std::string text(uint64_t value) { return std::to_string(value); }

// Whether the bytes are UTF-8 as RFC 3629 has it: no overlong forms, surrogates or values past
// 10FFFF.
bool is_utf8(const std::string& bytes) {
  for (size_t i = 0; i < bytes.size();) {
    const auto lead = static_cast<uint8_t>(bytes[i]);
    const int more = lead < 0x80                   ? 0
                     : lead >= 0xC2 && lead < 0xE0 ? 1
                     : (lead >> 4) == 0xE          ? 2
                     : lead >= 0xF0 && lead < 0xF5 ? 3
                                                   : -1;
    if (more < 0 || i + static_cast<size_t>(more) >= bytes.size()) return false;
    for (int j = 1; j <= more; ++j) {
      const auto next = static_cast<uint8_t>(bytes[i + static_cast<size_t>(j)]);
      uint8_t low = 0x80, high = 0xBF;
      if (j == 1 && lead == 0xE0) low = 0xA0;
      if (j == 1 && lead == 0xED) high = 0x9F;
      if (j == 1 && lead == 0xF0) low = 0x90;
      if (j == 1 && lead == 0xF4) high = 0x8F;
      if (next < low || next > high) return false;
    }
    i += static_cast<size_t>(more) + 1;
  }
  return true;
}

// Reads the header in order; every read is checked against its end.
class Reader {
 public:
  Reader(const uint8_t* data, size_t bytes) : at_(data), left_(bytes) {}

  template <typename T>
  T number(const std::string& field) {
    T value;
    std::memcpy(&value, take(sizeof(T), field), sizeof(T));
    return value;
  }
  std::string bytes(size_t length, const std::string& field) {
    return std::string(reinterpret_cast<const char*>(take(length, field)), length);
  }
  std::string string(size_t length, const std::string& field) {
    std::string value = bytes(length, field);
    if (!is_utf8(value)) fail(field, "is not UTF-8 text");
    return value;
  }
  std::string short_string(const std::string& field) {
    return string(number<uint16_t>(field + " (length)"), field);
  }
  // A count of records that each take at least `smallest` bytes: a lie cannot make us allocate.
  uint32_t count(const std::string& field, size_t smallest) {
    const auto n = number<uint32_t>(field);
    if (n > left_ / smallest) {
      fail(field, text(n) + " records cannot fit in the " + text(left_) + " bytes that are left");
    }
    return n;
  }
  size_t left() const { return left_; }

 private:
  const uint8_t* take(size_t bytes, const std::string& field) {
    if (bytes > left_) {
      fail(field, "needs " + text(bytes) + " bytes, the header has " + text(left_) + " left");
    }
    const uint8_t* start = at_;
    at_ += bytes;
    left_ -= bytes;
    return start;
  }
  const uint8_t* at_;
  size_t left_;
};

enum ValueType : uint8_t { kInt = 1, kDouble = 2, kString = 3, kIntArray = 4, kBool = 5 };
using Value = std::variant<int64_t, double, std::string, std::vector<int64_t>, bool>;
using Values = std::map<std::string, Value>;

Value read_value(Reader& in, const std::string& field) {
  const auto type = in.number<uint8_t>(field + " (type)");
  switch (type) {
    case kInt:
      return in.number<int64_t>(field);
    case kDouble:
      return in.number<double>(field);
    case kString:
      return in.string(in.number<uint32_t>(field + " (length)"), field);
    case kIntArray: {
      std::vector<int64_t> values(in.count(field + " (count)", sizeof(int64_t)));
      for (int64_t& value : values) value = in.number<int64_t>(field);
      return values;
    }
    case kBool: {
      const auto flag = in.number<uint8_t>(field);
      if (flag > 1) fail(field, "a flag is 0 or 1, found " + text(flag));
      return flag == 1;
    }
    default:
      fail(field, "unknown value type " + text(type));
  }
}

Values read_values(Reader& in, const std::string& section) {
  Values values;
  const uint32_t n = in.count(section + " (count)", 4);
  for (uint32_t i = 0; i < n; ++i) {
    const std::string key = in.short_string(section + " key " + text(i));
    if (!values.emplace(key, read_value(in, section + "." + key)).second) {
      fail(section + "." + key, "the key occurs twice");
    }
  }
  return values;
}

// Takes known keys out of a section; what stays is unknown to this version.
class Fields {
 public:
  explicit Fields(Values values) : values_(std::move(values)) {}

  template <typename T>
  T take(const std::string& key) {
    const auto found = values_.find(key);
    if (found == values_.end()) fail("descriptor." + key, "is missing");
    const T* value = std::get_if<T>(&found->second);
    if (value == nullptr) fail("descriptor." + key, "has a value of the wrong type");
    T result = *value;
    values_.erase(found);
    return result;
  }
  int64_t take_int(const std::string& key, int64_t low, int64_t high) {
    const auto value = take<int64_t>(key);
    if (value < low || value > high) {
      fail("descriptor." + key, std::to_string(value) + " is outside " + std::to_string(low) +
                                    ".." + std::to_string(high));
    }
    return value;
  }
  template <typename T>
  void expect(const std::string& key, const T& only) {
    if (take<T>(key) != only) fail("descriptor." + key, "has a value that version 1 does not know");
  }
  void expect_empty() const {
    if (!values_.empty()) {
      fail("descriptor." + values_.begin()->first, "is a key that version 1 does not know");
    }
  }

 private:
  Values values_;
};

NormPlacement norm_placement(const std::string& name) {
  if (name == "pre") return NormPlacement::kPre;
  if (name == "sandwich") return NormPlacement::kSandwich;
  fail("descriptor.norm_placement", "'" + name + "' is neither 'pre' nor 'sandwich'");
}

Descriptor read_descriptor(Fields in) {
  Descriptor d;
  d.family = in.take<std::string>("family");
  d.vocab_size = in.take_int("vocab_size", 1, int64_t{1} << 24);
  d.hidden_size = in.take_int("hidden_size", 1, 1 << 20);
  d.ffn_size = in.take_int("ffn_size", 1, 1 << 20);
  d.n_q_heads = in.take_int("n_q_heads", 1, 1 << 12);
  d.n_kv_heads = in.take_int("n_kv_heads", 1, 1 << 12);
  d.head_dim = in.take_int("head_dim", 2, 256);
  d.n_layers = in.take_int("n_layers", 1, 1 << 12);
  d.max_positions = in.take_int("max_positions", 1, kMaxDim);
  d.loops = in.take_int("loops", 1, 1 << 12);
  d.norm_eps = in.take<double>("norm_eps");
  d.norm_placement = norm_placement(in.take<std::string>("norm_placement"));
  d.loop_norm = in.take<bool>("loop_norm");
  in.expect<std::string>("rope_style", "half");
  d.exit_gate = in.take<bool>("exit_gate");
  d.tied_head = in.take<bool>("tied_head");
  in.expect<bool>("attn_bias", false);
  d.bos_id = in.take_int("bos_id", -1, d.vocab_size - 1);
  d.eos_ids = in.take<std::vector<int64_t>>("eos_ids");
  d.add_bos = in.take<bool>("add_bos");
  d.chat_template = in.take<std::string>("chat_template");
  in.expect_empty();

  if (!(d.norm_eps > 0.0) || !(d.norm_eps < 1.0)) {
    fail("descriptor.norm_eps", std::to_string(d.norm_eps) + " is outside (0, 1)");
  }
  if (d.n_q_heads % d.n_kv_heads != 0) {
    fail("descriptor.n_kv_heads",
         text(d.n_kv_heads) + " does not divide n_q_heads " + text(d.n_q_heads));
  }
  if (d.n_q_heads / d.n_kv_heads > kMaxGroupedHeads) {
    fail("descriptor.n_kv_heads", text(d.n_q_heads / d.n_kv_heads) +
                                      " query heads on one K/V head, at most " +
                                      text(kMaxGroupedHeads) + " are known to version 1");
  }
  if (d.head_dim % 2 != 0) fail("descriptor.head_dim", text(d.head_dim) + " is odd");
  if (!d.loop_norm) fail("descriptor.loop_norm", "false is not known to version 1");
  if (d.add_bos && d.bos_id < 0) fail("descriptor.add_bos", "is true, but there is no bos_id");
  for (const int64_t id : d.eos_ids) {
    if (id < 0 || id >= d.vocab_size) {
      fail("descriptor.eos_ids", std::to_string(id) + " is outside the vocabulary");
    }
  }
  return d;
}

// A blob's place. Blobs lie in order, each at the next multiple of 256, the gaps are zero; so no
// two can overlap and no byte of the file is unaccounted for.
class Layout {
 public:
  Layout(const uint8_t* data, size_t file_bytes, size_t start)
      : data_(data), file_bytes_(file_bytes), next_(start) {}

  const uint8_t* claim(uint64_t offset, uint64_t bytes, const std::string& field) {
    const size_t aligned = (next_ + kAlign - 1) / kAlign * kAlign;
    if (offset != aligned) {
      fail(field + " offset", text(offset) + " found, " + text(aligned) + " expected");
    }
    if (offset > file_bytes_ || bytes > file_bytes_ - offset) {
      fail(field + " bytes", text(bytes) + " at offset " + text(offset) + " pass the end of the " +
                                 text(file_bytes_) + " byte file");
    }
    for (size_t i = next_; i < aligned; ++i) {
      if (data_[i] != 0) fail(field + " padding", "byte " + text(i) + " of the file is not zero");
    }
    next_ = offset + bytes;
    return data_ + offset;
  }
  size_t end() const { return next_; }

 private:
  const uint8_t* data_;
  size_t file_bytes_;
  size_t next_;
};

uint64_t expected_bytes(const TensorEntry& t, const std::string& field) {
  const auto rows = static_cast<uint64_t>(t.rows);
  const auto values = rows * static_cast<uint64_t>(t.cols == 0 ? 1 : t.cols);
  switch (t.kind) {
    case TensorKind::kF32:
      return values * 4;
    case TensorKind::kF16:
      return values * 2;
    default:
      break;
  }
  if (t.cols == 0) fail(field + " rank", "a quantized tensor has rank 2");
  const bool four = t.kind == TensorKind::kQ4;
  if (four && t.cols % 2 != 0) fail(field + " dims", "an odd width cannot be packed at 4 bits");
  return (four ? values / 2 : values) + 4 * rows * static_cast<uint64_t>(t.groups());
}

TensorEntry read_tensor(Reader& in, uint32_t index, Layout& layout) {
  TensorEntry t;
  t.name = in.short_string("tensor " + text(index) + " name");
  const std::string field = "tensor '" + t.name + "'";
  const auto kind = in.number<uint8_t>(field + " kind");
  if (kind != 1 && kind != 2 && kind != 4 && kind != 8) {
    fail(field + " kind", "unknown kind " + text(kind));
  }
  t.kind = static_cast<TensorKind>(kind);
  const auto rank = in.number<uint8_t>(field + " rank");
  if (rank != 1 && rank != 2) fail(field + " rank", text(rank) + " is neither 1 nor 2");
  int64_t dims[2] = {0, 0};
  for (int i = 0; i < rank; ++i) {
    const auto dim = in.number<uint64_t>(field + " dims");
    if (dim == 0 || dim > static_cast<uint64_t>(kMaxDim)) {
      fail(field + " dims", text(dim) + " is outside 1.." + text(kMaxDim));
    }
    dims[i] = static_cast<int64_t>(dim);
  }
  t.rows = dims[0];
  t.cols = dims[1];
  const auto group = in.number<uint32_t>(field + " group");
  const bool quantized = t.kind == TensorKind::kQ4 || t.kind == TensorKind::kQ8;
  if (quantized ? (group != 32 && group != 64 && group != 128) : group != 0) {
    fail(field + " group", text(group) + " does not go with kind " + text(kind));
  }
  t.group = group;
  const auto offset = in.number<uint64_t>(field + " offset");
  const auto bytes = in.number<uint64_t>(field + " bytes");
  t.crc = in.number<uint32_t>(field + " crc32");
  const uint64_t expected = expected_bytes(t, field);
  if (bytes != expected) {
    fail(field + " bytes", text(bytes) + " found, its dims need " + text(expected));
  }
  t.data = layout.claim(offset, bytes, field);
  t.bytes = bytes;
  return t;
}

struct Preamble {
  uint64_t header_bytes;
  uint64_t data_offset;
};

Preamble read_preamble(const uint8_t* data, size_t bytes) {
  if (bytes < kPreamble) {
    fail("preamble", text(bytes) + " bytes are too few for a model file");
  }
  Reader in(data, kPreamble);
  if (in.bytes(8, "magic") != kMagic) fail("magic", "this is not a .tloop file");
  const auto version = in.number<uint32_t>("version");
  if (version < kVersionOldest || version > kVersionMax) {
    fail("version", text(version) + " found, this build reads " + text(kVersionOldest) + ".." +
                        text(kVersionMax));
  }
  const auto crc = in.number<uint32_t>("header_crc32");
  const auto header_bytes = in.number<uint64_t>("header_bytes");
  const auto data_offset = in.number<uint64_t>("data_offset");
  const auto file_bytes = in.number<uint64_t>("file_bytes");
  if (file_bytes != bytes) {
    fail("file_bytes", text(file_bytes) + " written, the file has " + text(bytes) +
                           ": it was truncated or padded, copy it again");
  }
  for (const char byte : in.bytes(24, "reserved")) {
    if (byte != 0) fail("reserved", "the reserved bytes of the preamble are not zero");
  }
  if (header_bytes > bytes - kPreamble) {
    fail("header_bytes", text(header_bytes) + " pass the end of the " + text(bytes) + " byte file");
  }
  const uint64_t aligned = (kPreamble + header_bytes + kAlign - 1) / kAlign * kAlign;
  if (data_offset != aligned) {
    fail("data_offset", text(data_offset) + " found, " + text(aligned) + " expected");
  }
  if (tinyloop::crc32(data + kPreamble, header_bytes) != crc) {
    fail("header_crc32", "the header's bytes do not match it: the file is damaged");
  }
  return {header_bytes, data_offset};
}

std::map<std::string, std::string> read_metadata(Reader& in) {
  std::map<std::string, std::string> metadata;
  for (auto& [key, value] : read_values(in, "metadata")) {
    const auto* string = std::get_if<std::string>(&value);
    if (string == nullptr) fail("metadata." + key, "is not a string");
    metadata[key] = *string;
  }
  return metadata;
}

}  // namespace

std::string display(const std::string& path) {
  const bool is_text = is_utf8(path);
  std::string shown = path;
  for (char& c : shown) {
    const auto byte = static_cast<uint8_t>(c);
    if (byte < 0x20 || (byte >= 0x80 && !is_text)) c = '?';
  }
  return shown;
}

MappedFile::MappedFile(const std::string& path) {
  if (path.find('\0') != std::string::npos) {
    throw LoadError("cannot open the model file: its path has a zero byte");
  }
  const auto refuse = [&](const char* what) {
    throw LoadError("cannot open the model file '" + display(path) + "': " + what + ": " +
                    std::strerror(errno));
  };
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) refuse("open");
  struct stat status;
  const bool known = ::fstat(descriptor, &status) == 0;
  if (!known || !S_ISREG(status.st_mode) || status.st_size == 0) {
    ::close(descriptor);
    if (!known) refuse("stat");
    throw LoadError("cannot open the model file '" + display(path) + "': it is " +
                    (S_ISREG(status.st_mode) ? "empty" : "not a regular file"));
  }
  bytes_ = static_cast<size_t>(status.st_size);
  void* data = ::mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, descriptor, 0);
  ::close(descriptor);
  if (data == MAP_FAILED) refuse("mmap");
  data_ = static_cast<const uint8_t*>(data);
}

MappedFile::~MappedFile() { ::munmap(const_cast<uint8_t*>(data_), bytes_); }

ModelFile parse_file(const uint8_t* data, size_t bytes) {
  const Preamble preamble = read_preamble(data, bytes);
  Reader in(data + kPreamble, preamble.header_bytes);
  ModelFile file;
  file.descriptor = read_descriptor(Fields(read_values(in, "descriptor")));
  file.metadata = read_metadata(in);
  // The gap between header and data belongs to the first blob's padding.
  Layout layout(data, bytes, kPreamble + preamble.header_bytes);
  const uint32_t n = in.count("tensors (count)", 36);
  std::set<std::string> names;
  for (uint32_t i = 0; i < n; ++i) {
    file.tensors.push_back(read_tensor(in, i, layout));
    if (!names.insert(file.tensors.back().name).second) {
      fail("tensor '" + file.tensors.back().name + "'", "occurs twice");
    }
  }
  const auto offset = in.number<uint64_t>("tokenizer offset");
  const auto tokenizer_bytes = in.number<uint64_t>("tokenizer bytes");
  const auto crc = in.number<uint32_t>("tokenizer crc32");
  if (in.left() != 0) fail("header_bytes", text(in.left()) + " bytes follow the last section");
  const uint8_t* tokenizer = layout.claim(offset, tokenizer_bytes, "tokenizer");
  if (tinyloop::crc32(tokenizer, tokenizer_bytes) != crc) {
    fail("tokenizer crc32", "the tokenizer's bytes do not match it: the file is damaged");
  }
  if (layout.end() != bytes) {
    fail("file_bytes", text(bytes - layout.end()) + " bytes follow the last blob");
  }
  file.tokenizer = {reinterpret_cast<const char*>(tokenizer), tokenizer_bytes};
  return file;
}

const TensorEntry& ModelFile::require(const std::string& name, int64_t rows, int64_t cols) const {
  const auto shape = [](int64_t r, int64_t c) {
    return "[" + std::to_string(r) + (c ? ", " + std::to_string(c) : "") + "]";
  };
  for (const TensorEntry& tensor : tensors) {
    if (tensor.name != name) continue;
    if (tensor.rows != rows || tensor.cols != cols) {
      fail("tensor '" + name + "' dims",
           shape(tensor.rows, tensor.cols) + " found, the descriptor needs " + shape(rows, cols));
    }
    if (cols == 0 && tensor.kind != TensorKind::kF32) {
      fail("tensor '" + name + "' kind", "a vector is stored as f32");
    }
    return tensor;
  }
  fail("tensor '" + name + "'", "is missing");
}

void check_crc(const TensorEntry& entry) {
  if (tinyloop::crc32(entry.data, entry.bytes) != entry.crc) {
    fail("tensor '" + entry.name + "' crc32", "its bytes do not match it: the file is damaged");
  }
}

}  // namespace tinyloop
