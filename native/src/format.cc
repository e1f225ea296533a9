#include "format.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <set>
#include <variant>

#include "crc32.h"
#include "kv.h"
#include "records.h"
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
constexpr size_t kMaxFamilyBytes = 64;
// What FP32 arithmetic can hold of a descriptor's number.
constexpr double kMaxReal = std::numeric_limits<float>::max();

using records::fail;
using records::Fields;
using records::is_utf8;
using records::read_values;
using records::Reader;
using records::text;

// A text's position in a list of names is the enum's value, so the names stand in the enum's order.
template <typename Enum>
Enum choice(const std::string& key, const std::string& name,
            std::initializer_list<const char*> names) {
  int value = 0;
  std::string all;
  for (const char* known : names) {
    if (name == known) return static_cast<Enum>(value);
    all += std::string(value++ == 0 ? "'" : ", '") + known + "'";
  }
  fail("descriptor." + key, "'" + name + "' is none of " + all);
}

std::string checked_family(const std::string& family) {
  const auto printable = [](char c) { return c >= 0x20 && c < 0x7F; };
  if (family.empty() || family.size() > kMaxFamilyBytes ||
      !std::all_of(family.begin(), family.end(), printable)) {
    fail("descriptor.family",
         "is not 1 to " + text(kMaxFamilyBytes) + " printable ASCII characters");
  }
  return family;
}

// A key that a file lacks has the default that stands here: files of the first families were
// written without it.
Descriptor take_descriptor(Fields& in) {
  Descriptor d;
  d.family = checked_family(in.take<std::string>("family"));
  d.vocab_size = in.take_int("vocab_size", 1, int64_t{1} << 24);
  d.hidden_size = in.take_int("hidden_size", 1, 1 << 20);
  d.ffn_size = in.take_int("ffn_size", 1, 1 << 20);
  d.n_q_heads = in.take_int("n_q_heads", 1, 1 << 12);
  d.n_kv_heads = in.take_int("n_kv_heads", 1, 1 << 12);
  d.head_dim = in.take_int("head_dim", 2, 256);
  d.n_layers = in.take_int("n_layers", 1, 1 << 12);
  d.n_prelude = in.take_count("n_prelude", 1 << 12);
  d.n_coda = in.take_count("n_coda", 1 << 12);
  d.n_low = in.take_count("n_low", 1 << 12);
  d.low_cycles = in.take_count("low_cycles", 1 << 12);
  d.max_positions = in.take_int("max_positions", 1, kMaxDim);
  d.loops = in.take_int("loops", 1, 1 << 12);
  d.norm_eps = in.take<double>("norm_eps");
  d.norm_placement = choice<NormPlacement>("norm_placement", in.take<std::string>("norm_placement"),
                                           {"pre", "sandwich", "branch", "sum"});
  d.norm_weight = in.take_or("norm_weight", true);
  d.loop_norm = in.take<bool>("loop_norm");
  d.exit_norm = in.take_or("exit_norm", false);
  d.state_init = choice<StateInit>("state_init", in.take_or<std::string>("state_init", "input"),
                                   {"input", "zero", "normal"});
  d.state_std = in.take_or("state_std", 0.0);
  d.inject =
      choice<Inject>("inject", in.take_or<std::string>("inject", "none"), {"none", "linear"});
  d.embed_scale = in.take_or("embed_scale", 1.0);
  d.rope_style =
      choice<RopeStyle>("rope_style", in.take<std::string>("rope_style"), {"half", "pair"});
  d.qk_norm = choice<QkNorm>("qk_norm", in.take_or<std::string>("qk_norm", "none"),
                             {"none", "head", "full"});
  d.exit_gate = in.take<bool>("exit_gate");
  d.tied_head = in.take<bool>("tied_head");
  d.attn_bias = in.take<bool>("attn_bias");
  d.attn_gate = in.take_or("attn_gate", false);
  d.prefix_lm = in.take_or("prefix_lm", false);
  d.bos_id = in.take_int("bos_id", -1, d.vocab_size - 1);
  d.eos_ids = in.take<std::vector<int64_t>>("eos_ids");
  d.add_bos = in.take<bool>("add_bos");
  d.chat_template = in.take<std::string>("chat_template");
  in.expect_empty();
  return d;
}

void check_numbers(const Descriptor& d) {
  if (!(d.norm_eps > 0.0) || !(d.norm_eps < 1.0)) {
    fail("descriptor.norm_eps", std::to_string(d.norm_eps) + " is outside (0, 1)");
  }
  if (!(d.embed_scale > 0.0) || !(d.embed_scale <= kMaxReal)) {
    fail("descriptor.embed_scale",
         std::to_string(d.embed_scale) + " is not a positive finite number");
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
}

// The one arithmetic that is known for two stacks.
void check_two_stacks(const Descriptor& d) {
  const auto require = [](bool holds, const char* key, const char* value) {
    if (!holds) {
      fail(std::string("descriptor.") + key,
           std::string("must be ") + value + " in a model of two stacks");
    }
  };
  require(d.n_prelude == 0, "n_prelude", "0");
  require(d.n_coda == 0, "n_coda", "0");
  require(d.inject == Inject::kNone, "inject", "'none'");
  require(d.state_init == StateInit::kInput, "state_init", "'input'");
  require(d.loop_norm, "loop_norm", "true");
  require(!d.exit_norm, "exit_norm", "false");
  require(!d.norm_weight, "norm_weight", "false");
  require(!d.exit_gate, "exit_gate", "false");
}

// The rules between keys, in the order of both readers.
void check_schedule(const Descriptor& d) {
  if (d.n_prelude + d.n_coda >= d.n_layers) {
    fail("descriptor.n_prelude", text(d.n_prelude) + " and n_coda " + text(d.n_coda) +
                                     " leave no layer of " + text(d.n_layers) + " to loop");
  }
  if (d.n_low >= d.n_layers) {
    fail("descriptor.n_low",
         text(d.n_low) + " leaves no layer of " + text(d.n_layers) + " for the high stack");
  }
  if ((d.n_low > 0) != (d.low_cycles > 0)) {
    fail("descriptor.low_cycles",
         text(d.low_cycles) + " does not go with n_low " + text(d.n_low) + ": both or neither");
  }
  if (d.n_low > 0) check_two_stacks(d);
  if (d.inject == Inject::kNone && d.state_init != StateInit::kInput) {
    fail("descriptor.state_init", "not 'input' without inject: the input would never be read");
  }
  const bool normal = d.state_init == StateInit::kNormal;
  if (normal ? !(d.state_std > 0.0 && d.state_std <= kMaxReal) : d.state_std != 0.0) {
    fail("descriptor.state_std",
         std::to_string(d.state_std) + ": positive where state_init is 'normal', 0 otherwise");
  }
  if (d.exit_norm && (d.loop_norm || d.n_coda == 0)) {
    fail("descriptor.exit_norm", "needs a coda and no loop_norm");
  }
  if (d.loop_norm && d.n_coda > 0) {
    fail("descriptor.loop_norm", "must be false in a model with a coda");
  }
  if (d.exit_gate && !d.loop_norm) {
    fail("descriptor.exit_gate", "needs loop_norm: it reads the normed state after each loop");
  }
}

void check_token_ids(const Descriptor& d) {
  if (d.add_bos && d.bos_id < 0) fail("descriptor.add_bos", "is true, but there is no bos_id");
  for (const int64_t id : d.eos_ids) {
    if (id < 0 || id >= d.vocab_size) {
      fail("descriptor.eos_ids", std::to_string(id) + " is outside the vocabulary");
    }
  }
}

Descriptor read_descriptor(Fields in) {
  Descriptor d = take_descriptor(in);
  check_numbers(d);
  check_schedule(d);
  check_token_ids(d);
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
